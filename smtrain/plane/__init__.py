"""The local control plane: its server, and the modules that find, start and stop it."""
