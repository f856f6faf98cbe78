#include "process.h"

#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#if defined(__linux__)
#include <fcntl.h>
#include <sched.h>
#endif

namespace dtrain {

#if defined(__linux__)

uint64_t process_start(int pid) {
  char path[40];
  std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
  const int file = ::open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  char text[1024];
  const ssize_t length = ::read(file, text, sizeof text - 1);
  ::close(file);
  if (length <= 0) return 0;
  text[length] = 0;
  // "pid (name) state ...": the name may hold anything, also brackets. The start is the 20th field after the state.
  const char* field = std::strrchr(text, ')');
  if (field == nullptr || field[1] == 0) return 0;
  field += 2;
  if (*field == 'Z' || *field == 'X') return 0;
  for (int skipped = 0; skipped < 19 && field != nullptr; ++skipped) {
    field = std::strchr(field, ' ');
    if (field != nullptr) ++field;
  }
  return field == nullptr ? 0 : std::strtoull(field, nullptr, 10);
}

void usable_processors(uint64_t (&words)[kProcessorWords]) {
  std::memset(words, 0, sizeof words);
  // Fails where there are more processors than bits.
  if (::sched_getaffinity(0, sizeof words, reinterpret_cast<cpu_set_t*>(words)) != 0)
    std::memset(words, 0, sizeof words);
}

#else

uint64_t process_start(int pid) { return ::kill(pid, 0) == 0 || errno == EPERM ? 1 : 0; }

void usable_processors(uint64_t (&words)[kProcessorWords]) { std::memset(words, 0, sizeof words); }

#endif

}  // namespace dtrain
