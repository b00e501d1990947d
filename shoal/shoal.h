// The engine for C++ users: requests of token ids in, tokens out (shoal/engine/engine.h). Operators have a header each:
// shoal/ops/<operator>/<operator>.h, see docs/operators.md.
#pragma once

#include "shoal/base/error.h"
#include "shoal/engine/engine.h"
