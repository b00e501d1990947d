"""Prints the golden hashes of float_bits_test.cpp, from numpy and ml_dtypes. Run by hand."""

import ml_dtypes
import numpy as np


def fnv1a(data: bytes) -> str:
    h = 0xCBF29CE484222325
    for byte in data:
        h = ((h ^ byte) * 0x100000001B3) % 2**64
    return f"0x{h:016x}ull"


def decoded(codes: np.ndarray, dtype: np.dtype) -> str:
    values = codes.view(dtype).astype(np.float32)
    values[np.isnan(values)] = np.nan  # one bit pattern for NaN: 0x7fc00000
    return fnv1a(values.tobytes())


all_8 = np.arange(256, dtype=np.uint8)
all_16 = np.arange(65536, dtype=np.uint16)
print("decode f16    ", decoded(all_16, np.dtype(np.float16)))
print("decode bf16   ", decoded(all_16, np.dtype(ml_dtypes.bfloat16)))
print("decode e4m3   ", decoded(all_8, np.dtype(ml_dtypes.float8_e4m3fn)))
print("decode e8m0   ", decoded(all_8, np.dtype(ml_dtypes.float8_e8m0fnu)))

# Every sign, exponent and upper mantissa with a lower half that varies; finite values only.
floats = (all_16.astype(np.uint32) * np.uint32(65537)).view(np.float32)
floats = floats[np.isfinite(floats)]
small = floats[np.abs(floats) <= 448]  # ml_dtypes does not saturate
with np.errstate(over="ignore"):
    print("encode f16    ", fnv1a(floats.astype(np.float16).tobytes()))
    print("encode bf16   ", fnv1a(floats.astype(ml_dtypes.bfloat16).tobytes()))
print("encode e4m3   ", fnv1a(small.astype(ml_dtypes.float8_e4m3fn).tobytes()))
