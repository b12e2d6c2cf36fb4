"""The image as a thing one owns: looked into, built on, verified, pulled and pushed."""
