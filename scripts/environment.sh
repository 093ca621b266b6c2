# Sourced by demo and test: makes a virtual environment, installs this checkout into it, leaves its Python in $python.
#
#   QUAROT_VENV   where (default .venv here; an active virtual environment is used as it is)
#   QUAROT_TORCH  what to install torch from (default the version this release is tested with)
#   QUAROT_EXTRAS extras of quarot to install
#   PYTHON        the interpreter to make the environment with (default python3)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${QUAROT_VENV:-${VIRTUAL_ENV:-$root/.venv}}
if [ ! -x "$venv/bin/python" ]; then
    "${PYTHON:-python3}" -m venv "$venv" || { echo "error: no virtual environment at $venv (Python 3.10 or newer, with venv, is needed)" >&2; exit 1; }
fi
python=$venv/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK=1

if command -v nvidia-smi >/dev/null && capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null) && [ -n "$capability" ]; then
    # Kernels for the GPUs here only: minutes instead of an hour.
    export QUAROT_CUDA_ARCHS=${QUAROT_CUDA_ARCHS:-$(echo "$capability" | sort -u | paste -sd';')}
else
    export QUAROT_CUDA=${QUAROT_CUDA:-0}  # nothing here could run kernels
fi
if ! "$python" -c 'import torch' 2>/dev/null; then
    echo "installing torch into $venv"
    "$python" -m pip install --quiet "${QUAROT_TORCH:-torch==2.13.0}" || exit 1
fi
stamp=$venv/.quarot-installed
wanted="$root ${QUAROT_EXTRAS:-} ${QUAROT_CUDA:-auto} $(cat "$root/pyproject.toml" "$root/setup.py" | cksum)"
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || [ -n "$(find "$root/csrc" -newer "$stamp" -name '*.c*' -print -quit 2>/dev/null)" ]; then
    echo "installing quarot into $venv (extension: QUAROT_CUDA=${QUAROT_CUDA:-auto})"
    "$python" -m pip install --quiet --editable "$root[${QUAROT_EXTRAS:-}]" || exit 1
    echo "$wanted" >"$stamp"
fi
