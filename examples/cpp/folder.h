// One version of an artifact folder, held open, and libraries loaded by their content: what replaces the artifact while
// it is read or used changes nothing. As in tvmflow/artifact/folder.py and tvmflow/runtime/content.py.
#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

struct Bytes {  // of a mapped file, until the process ends
  const char* data = nullptr;
  size_t size = 0;
};

class Folder {
 public:
  // Holds a shared lock as long as it lives, so that whoever replaces the artifact leaves this version's files alone.
  explicit Folder(const std::string& path) : path_(path) {
    for (int attempt = 0; attempt < 1000; ++attempt) {
      if ((handle_ = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) < 0) break;
      bool locked = flock(handle_, LOCK_SH | LOCK_NB) == 0 || errno != EWOULDBLOCK;  // else without locks
      struct stat mine {}, there {};
      if (locked && fstat(handle_, &mine) == 0 && stat(path.c_str(), &there) == 0 && mine.st_ino == there.st_ino &&
          mine.st_dev == there.st_dev) {
        return;
      }
      close(handle_);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    throw std::runtime_error(path + ": no artifact folder that can be opened");
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() { close(handle_); }

  std::string Read(const std::string& name) const {
    struct stat info {};
    int file = Open(name, &info);
    std::string content(info.st_size, '\0');
    size_t done = 0;
    for (ssize_t count = 1; done < content.size() && count > 0; done += count > 0 ? count : 0) {
      count = read(file, &content[done], content.size() - done);
    }
    close(file);
    if (done < content.size()) throw std::runtime_error(path_ + "/" + name + ": cannot be read");
    return content;
  }

  Bytes Map(const std::string& name) const {
    struct stat info {};
    int file = Open(name, &info);
    void* place = info.st_size ? mmap(nullptr, info.st_size, PROT_READ, MAP_PRIVATE, file, 0) : nullptr;
    close(file);
    if (place == MAP_FAILED) throw std::runtime_error(path_ + "/" + name + ": cannot be mapped");
    return {static_cast<const char*>(place), static_cast<size_t>(info.st_size)};
  }

 private:
  int Open(const std::string& name, struct stat* info) const {
    int file = openat(handle_, name.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (file >= 0 && fstat(file, info) == 0 && S_ISREG(info->st_mode)) return file;
    if (file >= 0) close(file);
    throw std::runtime_error(path_ + "/" + name + ": no file that can be opened");
  }

  std::string path_;
  int handle_ = -1;
};

// The system's loader knows libraries by path, device and inode, and would take one that replaced another for the one
// that is open. So each gets a file of its own in memory, under a path that was never used before.
inline tvm::ffi::Module LoadByContent(const std::string& content, const std::string& shown) {
  static std::atomic<unsigned> count{0};
  int file = memfd_create("tvmflow", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  size_t done = 0;
  for (ssize_t written = 1; file >= 0 && done < content.size() && written > 0; done += written > 0 ? written : 0) {
    written = write(file, content.data() + done, content.size() - done);
  }
  if (file < 0 || done < content.size()) throw std::runtime_error(shown + ": no memory for a copy of it");
  fcntl(file, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE);
  std::string path = "/proc/self/fd/";
  for (unsigned number = ++count; number; number >>= 1) path += number & 1 ? "./" : "/";
  path += std::to_string(file);
  try {
    auto load = tvm::ffi::Function::GetGlobalRequired("ffi.Module.load_from_file.so");
    auto library = load(path, "so").cast<tvm::ffi::Module>();
    close(file);
    return library;
  } catch (...) {
    close(file);
    throw;
  }
}
