// How long an all-reduce (and others) through the shared memory of one host takes, without MPI, torch or Python.
//
//   cd src/distributed_training/native/mpi
//   g++ -std=c++17 -O3 -pthread -I. -o host_memory_benchmark ../../../../benchmarks/host_memory.cpp reduce.cpp copy.cpp
//       process.cpp signature.cpp segment.cpp host_memory.cpp between_hosts.cpp
//   ./host_memory_benchmark [ranks] [chunk KB] [flat KB] [kind] [smallest KB] [largest KB]
//
// kind: allreduce, bf16, f16, reduce_scatter, allgather, broadcast, between, try. One line a size: the median and the
// best of some repetitions, in milliseconds, in the slowest rank, and the size over that time.
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "host_memory.h"

using namespace dtrain;
using Clock = std::chrono::steady_clock;

namespace {

void call(HostMemory& memory, const std::string& kind, float* data, float* output, size_t bytes,
          const Waiting& waiting) {
  const size_t count = bytes / 4;
  std::vector<const void*> inputs(memory.ranks());
  std::vector<void*> outputs(memory.ranks());
  const size_t part = count / memory.ranks();
  for (int rank = 0; rank < memory.ranks(); ++rank)
    inputs[rank] = data + rank * part, outputs[rank] = output + rank * part;
  if (kind == "allreduce") memory.allreduce(data, count, Dtype::f32, Op::sum, waiting);
  if (kind == "bf16") memory.allreduce(data, bytes / 2, Dtype::bf16, Op::sum, waiting);
  if (kind == "f16") memory.allreduce(data, bytes / 2, Dtype::f16, Op::sum, waiting);
  if (kind == "reduce_scatter") memory.reduce_scatter(inputs.data(), output, part, Dtype::f32, Op::sum, waiting);
  if (kind == "allgather") memory.allgather(data, outputs.data(), part * 4, waiting);
  if (kind == "broadcast") memory.broadcast(data, bytes, 0, waiting);
  if (kind == "between") memory.allreduce_between(data, count, Dtype::f32, Op::sum, [](void*, size_t) {}, waiting);
  if (kind == "try" && !memory.try_allreduce(data, count, Dtype::f32, Op::sum, std::chrono::microseconds(50)))
    memory.finish(waiting);
}

// Every rank on a processor of its own: else the system moves them about, and two on one may even look faster.
void pin(int rank) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(rank % sysconf(_SC_NPROCESSORS_ONLN), &set);
  sched_setaffinity(0, sizeof set, &set);
}

void measure(HostMemory& memory, const std::string& kind, size_t smallest, size_t largest, double* shared) {
  pin(memory.rank());
  std::vector<float> data(largest / 4, 0.0f), output(largest / 4, 0.0f);
  for (size_t bytes = smallest; bytes <= largest; bytes *= 2) {
    if (kind == "try" && !memory.is_small(bytes / 4, Dtype::f32)) break;
    const int inner = static_cast<int>(std::clamp<size_t>((4 << 20) / bytes, 1, 500));
    const int repetitions = static_cast<int>(std::clamp<size_t>((1 << 30) / bytes / inner, 7, 41));
    std::vector<double> times;
    for (int repetition = -2; repetition < repetitions; ++repetition) {
      const Waiting waiting(std::chrono::seconds(30));
      memory.barrier(waiting);
      const auto start = Clock::now();
      for (int i = 0; i < inner; ++i) call(memory, kind, data.data(), output.data(), bytes, waiting);
      shared[memory.rank()] = std::chrono::duration<double, std::milli>(Clock::now() - start).count() / inner;
      memory.barrier(waiting);
      if (repetition >= 0) times.push_back(*std::max_element(shared, shared + memory.ranks()));
      memory.barrier(waiting);
    }
    std::sort(times.begin(), times.end());
    if (memory.rank() == 0) {
      const double median = times[times.size() / 2];
      std::printf("%9zu KB  %9.4f ms  best %9.4f ms  %7.2f GB/s\n", bytes / 1024, median, times[0],
                  bytes / median / 1e6);
      std::fflush(stdout);
    }
  }
}

}  // namespace

int main(int count, char** words) {
  const auto number = [&](int place, size_t otherwise) {
    return count > place ? static_cast<size_t>(std::atol(words[place])) : otherwise;
  };
  const int ranks = static_cast<int>(number(1, 2));
  HostMemorySettings settings;
  settings.chunk_bytes = number(2, settings.chunk_bytes / 1024) * 1024;
  settings.flat_bytes = number(3, settings.flat_bytes / 1024) * 1024;
  settings.between_hosts_bytes = 4 << 20;
  const std::string kind = count > 4 ? words[4] : "allreduce";
  const size_t smallest = number(5, 4) * 1024, largest = number(6, 128 * 1024) * 1024;
  auto* shared = static_cast<double*>(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  int ends[2];
  if (pipe(ends) != 0) return 1;
  for (int rank = 1; rank < ranks; ++rank) {
    if (fork() != 0) continue;
    char name[64] = {};
    if (read(ends[0], name, sizeof name) != sizeof name) std::_Exit(1);
    const auto memory = HostMemory::attach(name, rank, ranks, settings);
    memory->ready(Waiting(std::chrono::seconds(30)));
    measure(*memory, kind, smallest, largest, shared);
    std::_Exit(0);
  }
  const auto memory = HostMemory::create(ranks, settings);
  char name[64] = {};
  std::snprintf(name, sizeof name, "%s", memory->name().c_str());
  for (int rank = 1; rank < ranks; ++rank) {
    if (write(ends[1], name, sizeof name) != sizeof name) return 1;
  }
  memory->ready(Waiting(std::chrono::seconds(30)));
  measure(*memory, kind, smallest, largest, shared);
  while (wait(nullptr) > 0) {
  }
  return 0;
}
