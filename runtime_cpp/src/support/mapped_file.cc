#include "support/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "aotllm/errors.h"
#include "support/strings.h"

namespace aotllm {
namespace {

constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ of Linux 5.14, which the C library may not know yet

class FileDescriptor {
 public:
  explicit FileDescriptor(const std::string& path) : fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {}
  ~FileDescriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;

  int get() const noexcept { return fd_; }

 private:
  int fd_;
};

[[noreturn]] void fail(const std::string& path, const std::string& reason) {
  throw Error(ErrorKind::kEngine, cat(path, ": ", reason));
}

std::string errno_text(int error) {
  return std::generic_category().message(error);
}

}  // namespace

MappedFile::MappedFile(const std::string& path) {
  const FileDescriptor fd(path);
  if (fd.get() < 0) fail(path, cat("cannot open the file: ", errno_text(errno)));
  struct stat status = {};
  if (::fstat(fd.get(), &status) != 0) fail(path, cat("cannot read the file's size: ", errno_text(errno)));
  if (!S_ISREG(status.st_mode)) fail(path, "expected a regular file");
  if (status.st_size == 0) fail(path, "the file is empty");

  const auto size = static_cast<std::size_t>(status.st_size);
  void* data = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd.get(), 0);
  if (data == MAP_FAILED) fail(path, cat("cannot map ", size, " bytes: ", errno_text(errno)));
  // Hints: their failure changes nothing but time. In huge pages, where the file system has them, a file is read into
  // fewer and larger ones, which are mapped in no time and cost a core that streams them fewer translations.
  ::madvise(data, size, MADV_HUGEPAGE);
  ::madvise(data, size, MADV_WILLNEED);
  data_ = static_cast<const std::uint8_t*>(data);
  size_ = size;
}

void MappedFile::populate() const noexcept {
  if (data_ != nullptr) ::madvise(const_cast<std::uint8_t*>(data_), size_, kPopulateRead);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::uint8_t*>(data_), size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

}  // namespace aotllm
