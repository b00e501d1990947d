// Memory of a unit, and which instruction set computes it.
#include "shoal/ops/sparse_attend.h"

#include <type_traits>

#include "shoal/base/checked.h"

namespace shoal::sparse {
namespace {

constexpr int64_t kNumRowValues = 4;

template <class Visit>
void visit_arrays(const Heads& heads, Scratch& scratch, Visit&& visit) {
  visit(scratch.query, heads.group * heads.stride);
  visit(scratch.rows, paged::kTile * heads.stride);
  visit(scratch.k_tile, paged::kTile * heads.stride);
  visit(scratch.weights, heads.group * paged::kTile);
  visit(scratch.acc, heads.group * heads.stride);
  visit(scratch.row_values, kNumRowValues * round_up(heads.group, paged::kPad));
  visit(scratch.zeros, heads.stride);
  visit(scratch.angles, 2 * heads.stride);
}

}  // namespace

Heads make_heads(DType type, int64_t head_dim, int64_t group, float scale, float softcap) {
  return {type, head_dim, round_up(head_dim, paged::kPad), group, scale, softcap, nullptr, head_dim, false};
}

size_t scratch_bytes(const Heads& heads) {
  Scratch scratch;
  size_t num_bytes = 0;
  visit_arrays(heads, scratch,
               [&](float*, int64_t count) { num_bytes += Workspace::bytes_for<float>(static_cast<size_t>(count)); });
  return num_bytes;
}

Scratch take_scratch(const Heads& heads, Workspace& workspace) {
  Scratch scratch;
  visit_arrays(heads, scratch, [&](float*& pointer, int64_t count) {
    pointer = workspace.take<float>(static_cast<size_t>(count)).data();
  });
  return scratch;
}

Attend pick_attend(cpu::Isa isa) { return SHOAL_PICK_ISA(isa, attend); }

}  // namespace shoal::sparse
