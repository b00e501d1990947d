#include "shoal/cuda/device.h"

#include "shoal/cuda/check.h"

namespace shoal::cuda {
namespace {

cudaStream_t handle(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

constexpr int kLowestMajor = 8;

void check_index(int device_idx) {
  const int count = device_count();
  if (device_idx < 0 || device_idx >= count) {
    fail(ErrorCode::kUnsupported, "there is no CUDA device ", device_idx, ": ",
         count == 0 ? why_no_device() : concat(count, " can be used"));
  }
}

}  // namespace

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  for (int i = 0; i < count; ++i) {
    int major = 0;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, i) != cudaSuccess || major < kLowestMajor) {
      return i;  // devices are numbered fastest first
    }
  }
  return count;
}

std::string why_no_device() {
  int version = 0;
  if (cudaDriverGetVersion(&version) != cudaSuccess || version == 0) {
    cudaGetLastError();
    return "no CUDA driver is installed";
  }
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    cudaGetLastError();
    return concat("the CUDA driver says: ", cudaGetErrorString(status));
  }
  if (count == 0) {
    return "the CUDA driver lists no device";
  }
  return device_count() > 0 ? "" : "the device is older than compute capability 8.0";
}

DeviceInfo device_info(int device_idx) {
  check_index(device_idx);
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, device_idx), "reading a device's properties");
  DeviceInfo info;
  info.name = properties.name;
  info.major = properties.major;
  info.minor = properties.minor;
  info.num_sms = properties.multiProcessorCount;
  use_device(device_idx);
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  check_cuda(cudaMemGetInfo(&free_bytes, &total_bytes), "reading a device's free memory");
  info.free_bytes = static_cast<int64_t>(free_bytes);
  info.total_bytes = static_cast<int64_t>(total_bytes);
  return info;
}

Allocator allocator(int device_idx) {
  check_index(device_idx);
  return {[](size_t num_bytes, Device device) -> void* {
            void* memory = nullptr;
            if (cudaSetDevice(device.index) != cudaSuccess || cudaMalloc(&memory, num_bytes) != cudaSuccess) {
              cudaGetLastError();
              return nullptr;
            }
            return memory;
          },
          [](void* memory, Device) { cudaFree(memory); },
          {DeviceType::kCuda, device_idx}};
}

Allocator pinned_allocator() {
  return {[](size_t num_bytes, Device) -> void* {
            void* memory = nullptr;
            if (cudaMallocHost(&memory, num_bytes) != cudaSuccess) {
              cudaGetLastError();
              return nullptr;
            }
            return memory;
          },
          [](void* memory, Device) { cudaFreeHost(memory); },
          {}};
}

void use_device(int device_idx) {
  check_index(device_idx);
  check_cuda(cudaSetDevice(device_idx), "choosing a device");
}

OwnedStream::OwnedStream() {
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
  stream_.handle = stream;
}

OwnedStream::~OwnedStream() { cudaStreamDestroy(handle(stream_)); }

void copy(void* to, const void* from, size_t num_bytes, Stream stream) {
  check_cuda(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDefault, handle(stream)), "copying");
}

void synchronize(Stream stream) { check_cuda(cudaStreamSynchronize(handle(stream)), "waiting for the device"); }

Event::Event(Stream stream) {
  cudaEvent_t event = nullptr;
  check_cuda(cudaEventCreate(&event), "making an event");
  event_ = event;
  check_cuda(cudaEventRecord(event, static_cast<cudaStream_t>(stream.handle)), "recording an event");
}

Event::~Event() { cudaEventDestroy(static_cast<cudaEvent_t>(event_)); }

double seconds_between(const Event& begin, const Event& end) {
  float milliseconds = 0.0f;
  check_cuda(
      cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(begin.get()), static_cast<cudaEvent_t>(end.get())),
      "reading a time");
  return 1e-3 * milliseconds;
}

Graph::~Graph() {
  if (executable_ != nullptr) {
    cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(executable_));
  }
}

Graph& Graph::operator=(Graph&& other) noexcept {
  std::swap(executable_, other.executable_);
  return *this;
}

void Graph::begin(Stream stream) {
  check_cuda(cudaStreamBeginCapture(handle(stream), cudaStreamCaptureModeThreadLocal), "recording a graph");
}

Graph Graph::end(Stream stream) {
  cudaGraph_t graph = nullptr;
  check_cuda(cudaStreamEndCapture(handle(stream), &graph), "recording a graph");
  cudaGraphExec_t executable = nullptr;
  const cudaError_t status = cudaGraphInstantiate(&executable, graph, 0);
  cudaGraphDestroy(graph);
  check_cuda(status, "instantiating a graph");
  Graph result;
  result.executable_ = executable;
  return result;
}

void Graph::abandon(Stream stream) noexcept {
  cudaGraph_t graph = nullptr;
  if (cudaStreamEndCapture(handle(stream), &graph) == cudaSuccess && graph != nullptr) {
    cudaGraphDestroy(graph);
  }
  cudaGetLastError();
}

void Graph::launch(Stream stream) const {
  check_cuda(cudaGraphLaunch(static_cast<cudaGraphExec_t>(executable_), handle(stream)), "launching a graph");
}

}  // namespace shoal::cuda
