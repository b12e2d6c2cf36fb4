"""The local control plane: its server, and the modules that find, start, stop and switch it."""
