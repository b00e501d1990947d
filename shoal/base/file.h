// Files: read-only maps and small reads, with errors that name the file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

namespace shoal {

// A whole file mapped read-only. Pages are loaded on demand and can be dropped again.
// A file that is truncated by another process while mapped is outside this contract, as for every mmap.
class MappedFile {
 public:
  // kInvalidArgument if the file does not exist or is not a regular file, kIo if it cannot be opened or mapped.
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  const std::filesystem::path& path() const { return path_; }

  // Drops resident pages inside [offset, offset + num_bytes): they are read again from the file when touched.
  // Used after a tensor was repacked, so that peak memory does not hold it twice.
  void drop(size_t offset, size_t num_bytes) const;

 private:
  std::filesystem::path path_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// The whole file as text. kInvalidArgument if it does not exist, kModelFormat if larger than `max_bytes`, kIo
// otherwise.
std::string read_text_file(const std::filesystem::path& path, uint64_t max_bytes);

}  // namespace shoal
