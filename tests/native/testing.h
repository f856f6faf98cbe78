// What the native tests share: checks, forked ranks over real shared memory, and a serial reference of every reduction.
#pragma once

#include <dirent.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <set>

#include "half.h"
#include "host_memory.h"

inline void explain() { std::fputs("\n", stderr); }

__attribute__((format(printf, 1, 2))) inline void explain(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  explain();
}

#define CHECK(condition, ...)                                             \
  do {                                                                    \
    if (!(condition)) {                                                   \
      std::fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      explain(__VA_ARGS__);                                               \
      std::_Exit(1);                                                      \
    }                                                                     \
  } while (false)

namespace dtrain {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

inline Waiting patient() { return Waiting(seconds(60)); }

inline std::set<std::string> left_in_shared_memory() {
  std::set<std::string> found;
  DIR* folder = opendir("/dev/shm");
  if (folder == nullptr) return found;
  while (const dirent* entry = readdir(folder)) {
    if (std::strncmp(entry->d_name, "dtrain-", 7) == 0) found.insert(entry->d_name);
  }
  closedir(folder);
  return found;
}

using Body = std::function<void(HostMemory&)>;

// Fork `ranks` processes that share memory and run `body`. Returns their exit statuses by rank. A process that is
// stopped or still there when the others have ended is killed, so that no test leaves one behind.
inline std::vector<int> fork_ranks(int ranks, const HostMemorySettings& settings, const Body& body) {
  std::vector<std::vector<int>> pipes(ranks, std::vector<int>(2));
  for (auto& pair : pipes) CHECK(pipe(pair.data()) == 0);
  std::vector<pid_t> processes;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t process = fork();
    CHECK(process >= 0);
    if (process != 0) {
      processes.push_back(process);
      continue;
    }
    alarm(60);
    std::unique_ptr<HostMemory> memory;
    if (rank == 0) {
      memory = HostMemory::create(ranks, settings);
      for (int peer = 1; peer < ranks; ++peer) {
        const std::string name = memory->name() + "\n";
        CHECK(write(pipes[peer][1], name.data(), name.size()) == static_cast<ssize_t>(name.size()));
      }
    } else {
      char text[256] = {};
      CHECK(read(pipes[rank][0], text, sizeof text - 1) > 1);
      *std::strchr(text, '\n') = 0;
      memory = HostMemory::attach(text, rank, ranks, settings);
    }
    memory->ready(patient());
    body(*memory);
    memory.reset();
    std::_Exit(0);
  }
  for (auto& pair : pipes) close(pair[0]), close(pair[1]);
  std::vector<int> statuses(ranks, -1);
  // Zombies stay until everybody else is through: a dead peer must be noticed as one.
  std::set<int> open;
  for (int rank = 0; rank < ranks; ++rank) open.insert(rank);
  while (!open.empty()) {
    bool only_stopped = true;
    std::vector<int> ended;
    for (const int rank : open) {
      siginfo_t info{};
      waitid(P_PID, processes[rank], &info, WEXITED | WSTOPPED | WNOHANG | WNOWAIT);
      if (info.si_pid == 0) only_stopped = false;
      if (info.si_pid != 0 && info.si_code != CLD_STOPPED) ended.push_back(rank);
    }
    if (ended.size() == open.size() || only_stopped) {
      for (const int rank : open) {
        kill(processes[rank], SIGKILL);
        waitpid(processes[rank], &statuses[rank], 0);
      }
      break;
    }
    usleep(2000);
  }
  return statuses;
}

inline void run_ranks(int ranks, const HostMemorySettings& settings, const Body& body) {
  const auto statuses = fork_ranks(ranks, settings, body);
  for (int rank = 0; rank < ranks; ++rank)
    CHECK(statuses[rank] == 0, "rank %d of %d: status %d", rank, ranks, statuses[rank]);
}

inline HostMemorySettings small_chunks() {
  HostMemorySettings settings;
  settings.chunk_bytes = 16 * 1024;
  settings.flat_bytes = 16 * 1024;
  settings.between_hosts_bytes = 64 * 1024;
  return settings;
}

inline const Dtype kDtypes[] = {Dtype::f32, Dtype::f64, Dtype::f16, Dtype::bf16, Dtype::i8,
                         Dtype::u8,  Dtype::i16, Dtype::i32, Dtype::i64,  Dtype::boolean};
inline const Op kOps[] = {Op::sum, Op::average, Op::minimum, Op::maximum, Op::product, Op::band, Op::bor, Op::bxor};

inline bool is_float(Dtype dtype) { return dtype <= Dtype::bf16; }

inline uint64_t mix(uint64_t value) {
  value = (value ^ (value >> 31)) * 0x7fb5d329728ea185;
  value = (value ^ (value >> 27)) * 0x81dadef4bc2dd44d;
  return value ^ (value >> 33);
}

// Element `index` of `rank`: small fractions for floats, anything for integers.
inline void put(void* data, size_t index, Dtype dtype, uint64_t seed) {
  const uint64_t random = mix(seed * 1000003 + index);
  const double real = static_cast<double>(random % 4001) / 500.0 - 4.0;
  auto* bytes = static_cast<uint8_t*>(data) + index * size_of(dtype);
  const float single = static_cast<float>(real);
  const uint16_t half = dtype == Dtype::f16 ? f16_of(single) : bf16_of(single);
  const uint8_t boolean = random % 3 == 0;
  switch (dtype) {
    case Dtype::f32: std::memcpy(bytes, &single, 4); break;
    case Dtype::f64: std::memcpy(bytes, &real, 8); break;
    case Dtype::f16:
    case Dtype::bf16: std::memcpy(bytes, &half, 2); break;
    case Dtype::boolean: *bytes = boolean; break;
    default: std::memcpy(bytes, &random, size_of(dtype)); break;
  }
}

inline std::vector<uint8_t> make(size_t count, Dtype dtype, uint64_t seed) {
  std::vector<uint8_t> data(count * size_of(dtype) + 1);
  for (size_t i = 0; i < count; ++i) put(data.data(), i, dtype, seed);
  data.back() = 0x5a;  // a guard after the end
  return data;
}

template <class T>
T combine(T a, T b, Op op) {
  switch (op) {
    case Op::sum:
    case Op::average: return a + b;
    case Op::product: return a * b;
    case Op::minimum: return std::isnan(a) ? a : std::isnan(b) ? b : a < b ? a : b;
    default: return std::isnan(a) ? a : std::isnan(b) ? b : a > b ? a : b;
  }
}

template <class T>
T combine_integers(T a, T b, Op op) {
  switch (op) {
    case Op::sum:
    case Op::average: return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
    case Op::product: return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    case Op::minimum: return std::min(a, b);
    case Op::maximum: return std::max(a, b);
    case Op::band: return static_cast<T>(a & b);
    case Op::bor: return static_cast<T>(a | b);
    default: return static_cast<T>(a ^ b);
  }
}

template <class T, class Load, class Store, class Combine>
void reference_of(std::vector<uint8_t>& result, const std::vector<std::vector<uint8_t>>& from, size_t count,
                  size_t size, Op op, const Load& load, const Store& store, const Combine& combine_two) {
  for (size_t i = 0; i < count; ++i) {
    T value = load(from[0].data() + i * size);
    for (size_t source = 1; source < from.size(); ++source)
      value = combine_two(value, load(from[source].data() + i * size), op);
    if (op == Op::average) value = static_cast<T>(value / static_cast<T>(from.size()));
    store(result.data() + i * size, value);
  }
}

template <class T>
T get(const uint8_t* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

template <class T>
void set(uint8_t* bytes, T value) {
  std::memcpy(bytes, &value, sizeof value);
}

template <class T>
void integer_reference(std::vector<uint8_t>& result, const std::vector<std::vector<uint8_t>>& from, size_t count,
                       Op op) {
  reference_of<T>(result, from, count, sizeof(T), op, get<T>, set<T>, combine_integers<T>);
}

inline std::vector<uint8_t> reference(const std::vector<std::vector<uint8_t>>& from, size_t count, Dtype dtype, Op op) {
  std::vector<uint8_t> result = from[0];
  const auto half = [&](auto to_float, auto of_float) {
    reference_of<float>(
        result, from, count, 2, op, [&](const uint8_t* bytes) { return to_float(get<uint16_t>(bytes)); },
        [&](uint8_t* bytes, float value) { set<uint16_t>(bytes, of_float(value)); }, combine<float>);
  };
  switch (dtype) {
    case Dtype::f32: reference_of<float>(result, from, count, 4, op, get<float>, set<float>, combine<float>); break;
    case Dtype::f64: reference_of<double>(result, from, count, 8, op, get<double>, set<double>, combine<double>); break;
    case Dtype::f16: half(float_of_f16, f16_of); break;
    case Dtype::bf16: half(float_of_bf16, bf16_of); break;
    case Dtype::i8: integer_reference<int8_t>(result, from, count, op); break;
    case Dtype::u8: integer_reference<uint8_t>(result, from, count, op); break;
    case Dtype::i16: integer_reference<int16_t>(result, from, count, op); break;
    case Dtype::i32: integer_reference<int32_t>(result, from, count, op); break;
    case Dtype::i64: integer_reference<int64_t>(result, from, count, op); break;
    case Dtype::boolean: {
      const Op as = op == Op::sum || op == Op::maximum       ? Op::bor
                    : op == Op::product || op == Op::minimum ? Op::band
                                                             : op;
      integer_reference<uint8_t>(result, from, count, as);
      break;
    }
  }
  return result;
}

inline std::vector<uint8_t> reference_of_ranks(int ranks, size_t count, Dtype dtype, Op op, uint64_t seed) {
  std::vector<std::vector<uint8_t>> all;
  for (int rank = 0; rank < ranks; ++rank) all.push_back(make(count, dtype, seed * 64 + rank));
  return reference(all, count, dtype, op);
}

}  // namespace dtrain
