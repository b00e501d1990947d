// Stands in for device.cpp in builds without CUDA.
#include "shoal/cuda/device.h"

namespace shoal::cuda {
namespace {

[[noreturn]] void refuse() { fail(ErrorCode::kUnsupported, why_no_device()); }

}  // namespace

int device_count() { return 0; }
std::string why_no_device() { return "this build of shoal has no CUDA (SHOAL_CUDA=ON builds it)"; }
DeviceInfo device_info(int) { refuse(); }
Allocator allocator(int) { refuse(); }
Allocator pinned_allocator() { refuse(); }
void use_device(int) { refuse(); }
OwnedStream::OwnedStream() { refuse(); }
OwnedStream::~OwnedStream() = default;
void copy(void*, const void*, size_t, Stream) { refuse(); }
void synchronize(Stream) { refuse(); }
Event::Event(Stream) { refuse(); }
Event::~Event() = default;
double seconds_between(const Event&, const Event&) { refuse(); }
Graph::~Graph() = default;
Graph& Graph::operator=(Graph&&) noexcept { return *this; }
void Graph::begin(Stream) { refuse(); }
Graph Graph::end(Stream) { refuse(); }
void Graph::abandon(Stream) noexcept {}
void Graph::launch(Stream) const { refuse(); }

}  // namespace shoal::cuda
