# The module is written by setup.py (build_cuda/command.py); absent where quarot was not installed.
cuda: bool
reason: str
nvcc: str
architectures: list[int]
ptx_architectures: list[int]
