"""The local control plane's server: SageMaker's training API on 127.0.0.1, with this machine as its
instances.

It is a separate process (`python -m smtrain.plane.server.serve`), which `smtrain.plane.client`
finds and starts.
"""
