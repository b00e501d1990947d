// The CUDA paths of rows.h: checked arguments.
#pragma once

#include "shoal/ops/rows/rows.h"

namespace shoal::cuda {

void gather_rows(const GatherRowsArgs& args, const OpContext& context);
void sort_rows(const SortRowsArgs& args, const OpContext& context);
void combine_rows(const CombineRowsArgs& args, const OpContext& context);
void add_gated_rows(const AddGatedRowsArgs& args, const OpContext& context);

}  // namespace shoal::cuda
