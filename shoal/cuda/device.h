// CUDA devices and their memory, without CUDA's headers. A build without CUDA has these functions too: it finds no
// device, and all but device_count() throw kUnsupported.
//
// Errors    kUnsupported: no such device, or no CUDA in this build; kOutOfMemory; kInternal with CUDA's own words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "shoal/tensor/stream.h"
#include "shoal/tensor/tensor.h"

namespace shoal::cuda {

// Devices of compute capability 8.0 or newer that this build and the driver can use; 0 without a driver.
int device_count();
// Why device_count() is 0, as a sentence; empty if it is not.
std::string why_no_device();

struct DeviceInfo {
  std::string name;  // "NVIDIA H200"
  int major = 0;     // compute capability
  int minor = 0;
  int num_sms = 0;
  int64_t total_bytes = 0;
  int64_t free_bytes = 0;
};
DeviceInfo device_info(int device_idx);

// Memory of a device. Ordinary allocations: not inside a step.
Allocator allocator(int device_idx);

// Makes a device the calling thread's; every thread that launches work calls it first.
void use_device(int device_idx);

class OwnedStream {
 public:
  OwnedStream();  // on the thread's device
  ~OwnedStream();
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;
  Stream get() const { return stream_; }

 private:
  Stream stream_;
};

// Host memory that copies to and from a device without a stop in between.
Allocator pinned_allocator();

// Ordered in the stream. Host memory must live until it has been passed.
void copy(void* to, const void* from, size_t num_bytes, Stream stream);
// Waits for everything in the stream, and throws what went wrong in it.
void synchronize(Stream stream);

// A point in a stream's work, for timing.
class Event {
 public:
  explicit Event(Stream stream);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void* get() const { return event_; }

 private:
  void* event_ = nullptr;
};
double seconds_between(const Event& begin, const Event& end);  // both passed

// What a stream does between begin() and end(), to be done again at one launch.
class Graph {
 public:
  Graph() = default;
  ~Graph();
  Graph(Graph&& other) noexcept : executable_(other.executable_) { other.executable_ = nullptr; }
  Graph& operator=(Graph&& other) noexcept;
  static void begin(Stream stream);
  static Graph end(Stream stream);
  static void abandon(Stream stream) noexcept;  // ends a recording that went wrong
  void launch(Stream stream) const;
  explicit operator bool() const { return executable_ != nullptr; }

 private:
  void* executable_ = nullptr;
};

}  // namespace shoal::cuda
