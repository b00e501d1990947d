// The CUDA paths of the routers: checked arguments. kUnsupported names what has no kernel.
#pragma once

#include "shoal/ops/moe_router/moe_router.h"

namespace shoal::cuda {

void route_experts(const RouteExpertsArgs& args, const OpContext& context);
void route_packed_experts(const RoutePackedArgs& args, const OpContext& context);
void moe_group_router_full(const MoEGroupRouterArgs& args, const OpContext& context);  // full_scores, no projection

}  // namespace shoal::cuda
