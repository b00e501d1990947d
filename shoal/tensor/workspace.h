// Workspace: scratch memory of a step. Reserved once from plans, handed out by bumping a pointer, never grown inside
// `run`.
#pragma once

#include <cstddef>
#include <span>

#include "shoal/base/checked.h"
#include "shoal/base/error.h"
#include "shoal/tensor/tensor.h"

namespace shoal {

class Workspace {
 public:
  Workspace() = default;
  explicit Workspace(size_t num_bytes) : buffer_(num_bytes) {}
  // Empty, of memory that `allocator` gives.
  explicit Workspace(const Allocator& allocator) : allocator_(allocator) {}

  // Grows to at least `num_bytes`; contents are lost. Only between steps.
  void reserve(size_t num_bytes) {
    SHOAL_ASSERT(used_ == 0);
    if (num_bytes > buffer_.size()) {
      buffer_ = AlignedBuffer();  // the old one goes first
      buffer_ = AlignedBuffer(num_bytes, allocator_);
    }
  }

  // Memory for `count` values of T, 64-byte aligned, uninitialised, valid until the enclosing Scope ends.
  template <class T>
  std::span<T> take(size_t count) {
    // The first condition keeps the product of the second from wrapping.
    if (count > buffer_.size() || bytes_for<T>(count) > buffer_.size() - used_) {
      fail(ErrorCode::kInternal, "workspace of ", buffer_.size(), " bytes is too small: ", used_, " used, ", count,
           " more values of ", sizeof(T), " bytes needed");
    }
    const size_t num_bytes = bytes_for<T>(count);
    T* start = reinterpret_cast<T*>(buffer_.data() + used_);
    used_ += num_bytes;
    return {start, count};
  }

  size_t capacity() const { return buffer_.size(); }
  Device device() const { return allocator_.device; }

  // Bytes that `take<T>(count)` uses: for plans.
  template <class T>
  static size_t bytes_for(size_t count) {
    return round_up(count * sizeof(T), kAlignment);
  }

  // Gives back everything taken since its construction.
  class Scope {
   public:
    explicit Scope(Workspace& workspace) : workspace_(workspace), mark_(workspace.used_) {}
    ~Scope() { workspace_.used_ = mark_; }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Workspace& workspace_;
    size_t mark_;
  };

 private:
  static constexpr size_t kAlignment = 64;
  Allocator allocator_ = host_allocator();
  AlignedBuffer buffer_;
  size_t used_ = 0;
};

}  // namespace shoal
