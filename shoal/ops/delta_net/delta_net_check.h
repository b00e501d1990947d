// Checked calls as problems: for the entry.
#pragma once

#include "shoal/ops/delta_net/delta_net_problem.h"

namespace shoal::delta {

// The problem without outputs.
Problem problem_of(const GatedDeltaNetArgs& args, GatedDeltaNetShapes& shapes);
Problem problem_of(const LinearAttentionArgs& args, LinearAttentionShapes& shapes);

// Adds the outputs, which must fit the shapes.
void add_outputs(const GatedDeltaNetArgs& args, const GatedDeltaNetShapes& shapes, Problem& problem);
void add_outputs(const LinearAttentionArgs& args, const LinearAttentionShapes& shapes, Problem& problem);

}  // namespace shoal::delta
