#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Products of PyTorch's tensors on Bellows' device, compared with PyTorch's own.

    python3 matmul.py build/libdlpack_matmul.so

Where CUDA's driver serves Bellows' device, tensors of CUDA are multiplied, too.
"""

import ctypes
import sys

import torch

NAME = b"dltensor"
USED = b"used_dltensor"
capsules = ctypes.pythonapi
capsules.PyCapsule_New.restype = ctypes.py_object
capsules.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
capsules.PyCapsule_GetPointer.restype = ctypes.c_void_p
capsules.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
capsules.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]


def matmul(library, a, b):
    """a times the transpose of b, computed by Bellows."""
    if a.is_cuda:
        torch.cuda.synchronize()  # Bellows does not know PyTorch's streams
    given = [torch.utils.dlpack.to_dlpack(x) for x in (a, b)]
    pointers = [capsules.PyCapsule_GetPointer(capsule, NAME) for capsule in given]
    result = library.matmul(*pointers)
    if not result:
        raise RuntimeError(library.matmul_error().decode())
    for capsule in given:
        capsules.PyCapsule_SetName(capsule, USED)  # Bellows has taken it over
    return torch.from_dlpack(capsules.PyCapsule_New(result, NAME, None))


def main():
    library = ctypes.CDLL(sys.argv[1])
    library.matmul.restype = ctypes.c_void_p
    library.matmul.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.matmul_error.restype = ctypes.c_char_p
    torch.manual_seed(1)
    wrong = 0
    for device in ["cpu"] + (["cuda"] if torch.cuda.is_available() else []):
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
            a = torch.randn(96, 256, device=device).to(dtype)
            b = torch.randn(64, 256, device=device).to(dtype)
            expected = a.double() @ b.double().T
            got = matmul(library, a, b)
            error = ((got.double() - expected).abs().max() / expected.abs().max()).item()
            good = error <= tolerance and got.device == a.device and got.dtype == dtype
            wrong += not good
            print(f"{device} {dtype}: {'good' if good else 'WRONG'}, error {error:.1e}")
    sys.exit(wrong != 0)


if __name__ == "__main__":
    main()
