#include "shoal/base/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "shoal/base/error.h"
#include "shoal/base/text.h"

namespace shoal {
namespace {

class FileDescriptor {
 public:
  // Not blocking: opening a FIFO would wait for a writer, before it can be refused as no regular file.
  explicit FileDescriptor(const std::filesystem::path& path)
      : fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
    if (fd_ < 0) {
      const int reason = errno;
      const ErrorCode code = reason == ENOENT || reason == ENOTDIR ? ErrorCode::kInvalidArgument : ErrorCode::kIo;
      fail(code, "cannot open \"", printable(path.string()), "\": ", std::strerror(reason));
    }
  }
  ~FileDescriptor() { ::close(fd_); }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

uint64_t regular_file_size(const FileDescriptor& file, const std::filesystem::path& path) {
  struct stat info {};
  if (::fstat(file.get(), &info) != 0) {
    fail(ErrorCode::kIo, "cannot read the size of \"", printable(path.string()), "\": ", std::strerror(errno));
  }
  require(S_ISREG(info.st_mode), "\"", printable(path.string()), "\" is not a regular file");
  return static_cast<uint64_t>(info.st_size);
}

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& path) : path_(path) {
  const FileDescriptor file(path);
  size_ = regular_file_size(file, path);
  if (size_ == 0) {
    return;
  }
  void* address = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (address == MAP_FAILED) {
    fail(ErrorCode::kIo, "cannot map \"", printable(path.string()), "\": ", std::strerror(errno));
  }
  data_ = static_cast<const std::byte*>(address);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) {
    ::munmap(const_cast<std::byte*>(data_), size_);
  }
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

void MappedFile::drop(size_t offset, size_t num_bytes) const {
  SHOAL_ASSERT(offset <= size_ && num_bytes <= size_ - offset);
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const size_t begin = (offset + page - 1) / page * page;  // only whole pages: neighbours stay
  const size_t end = (offset + num_bytes) / page * page;
  if (begin < end) {
    ::madvise(const_cast<std::byte*>(data_) + begin, end - begin, MADV_DONTNEED);
  }
}

std::string read_text_file(const std::filesystem::path& path, uint64_t max_bytes) {
  const FileDescriptor file(path);
  const uint64_t size = regular_file_size(file, path);
  if (size > max_bytes) {
    fail(ErrorCode::kModelFormat, "\"", printable(path.string()), "\" has ", size, " bytes, at most ", max_bytes,
         " are allowed");
  }
  std::string text(size, '\0');
  size_t done = 0;
  while (done < size) {
    const ssize_t got = ::read(file.get(), text.data() + done, size - done);
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got <= 0) {
      fail(ErrorCode::kIo, "cannot read \"", printable(path.string()),
           "\": ", got < 0 ? std::strerror(errno) : "it ended early");
    }
    done += static_cast<size_t>(got);
  }
  return text;
}

}  // namespace shoal
