"""Writes iq_grids.h: the grids of the IQ2 and IQ3 formats, from the numeric tables of the PyPI package `gguf`.

python make_iq_grids.py > iq_grids.h      (also prints the checksums that quant_test.cpp holds, on stderr)
"""

import sys
import zlib
from importlib.metadata import version

import numpy as np
from gguf import quants

HEADER = """\
// Written by make_iq_grids.py from the tables of the `gguf` package {version}: do not edit.
//
// The grids of the IQ2 and IQ3 formats: every code names a point of 8 (IQ2) or 4 (IQ3) values. An entry packs one
// point, first value in the lowest bits, 2 or 4 bits a value; these index the few levels that occur.
#pragma once

#include <cstddef>
#include <cstdint>

namespace shoal::iq {{

// A grid with its levels filled in: one byte a value.
template <size_t kPoints, size_t kValues>
struct Grid {{
  uint8_t points[kPoints][kValues] = {{}};

  template <size_t kLevels>
  constexpr Grid(const uint16_t (&packed)[kPoints], const uint8_t (&levels)[kLevels]) {{
    constexpr unsigned kBits = 16 / kValues;
    for (size_t point = 0; point < kPoints; ++point) {{
      for (size_t i = 0; i < kValues; ++i) {{
        points[point][i] = levels[packed[point] >> (kBits * i) & ((1u << kBits) - 1)];
      }}
    }}
  }}
}};

// clang-format off
"""


def emit(name: str, cls) -> None:
    cls.init_grid()
    points, values = cls.grid_shape
    grid = cls.grid.reshape(points, values)
    levels = list(cls.grid_map)
    bits = 16 // values
    print(f"constexpr Grid<{points}, {values}> k{name}(")
    print("    {", end="")
    for point in range(points):
        packed = sum(levels.index(int(v)) << (bits * i) for i, v in enumerate(grid[point]))
        print(("" if point % 16 else "\n     ") + f"{packed}", end="," if point + 1 < points else "")
    print("},")
    print("    {" + ", ".join(str(v) for v in levels) + "});\n")
    crc = zlib.crc32(grid.astype(np.uint8).tobytes())
    print(f"{name}: crc32 of the points 0x{crc:08x}", file=sys.stderr)


def main() -> None:
    print(HEADER.format(version=version("gguf")))
    emit("Iq2Xxs", quants.IQ2_XXS)
    emit("Iq2Xs", quants.IQ2_XS)
    emit("Iq2S", quants.IQ2_S)
    emit("Iq3Xxs", quants.IQ3_XXS)
    emit("Iq3S", quants.IQ3_S)
    print("// clang-format on\n\n}  // namespace shoal::iq")


if __name__ == "__main__":
    main()
