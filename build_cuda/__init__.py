"""How ``quarot._C`` is compiled: nvcc and ninja, no torch and no torch headers, so one binary serves every torch.

``setup.py`` calls :class:`build_cuda.command.BuildExt`; ``python -m build_cuda`` compiles without installing. The rule
that a folder under ``csrc`` decides the GPU architectures of its kernels is in :mod:`build_cuda.architectures`.
"""
