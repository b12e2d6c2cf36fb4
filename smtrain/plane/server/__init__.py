"""The local control plane: SageMaker's training API on 127.0.0.1, with this machine as its instances.

The server alone, a process of its own (`python -m smtrain.plane.server.serve`). It is found and started by
`smtrain.plane.client`; what can be made to go wrong in it is in `smtrain.plane.testing.switches`.
"""
