// Collectives between the ranks of one host through shared memory.
//
// Every rank owns a few small buffers ("slots") in one segment that all local ranks map. A message is cut into chunks
// that stay in the caches: a rank fills its slot, raises a counter, and reads what its peers put in theirs. Counters
// only grow, chunks are numbered across collectives, and slots rotate, so that no second barrier is needed (the proof
// is in host_state.h). Results are reduced in the order of ranks 0..p-1 by one owner or by everybody in the same way:
// all ranks get the same bits.
//
// Threads: one thread at a time per rank and HostMemory, and all ranks make the same calls in the same order. abort()
// alone may be called from any thread at any time. Ranks are the ranks on this host, 0..ranks()-1.
//
// Failure: an exception out of a collective leaves the tensors undefined and this HostMemory broken: it tells the peers
// (their waits throw Aborted with the reason, so nobody waits for its full deadline) and each later call throws
// Aborted. std::invalid_argument and std::logic_error (bad arguments, wrong use) come before anything is shared and
// break nothing.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "reduce.h"

namespace dtrain {

// The base of all that goes wrong between the ranks of a host.
struct HostMemoryError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Shared memory is not to be had here (no /dev/shm, it is full, the segment cannot be opened): use plain MPI.
struct Unavailable : HostMemoryError {
  using HostMemoryError::HostMemoryError;
};

// The deadline passed. `missing` are the local ranks that had not arrived.
struct TimedOut : HostMemoryError {
  TimedOut(const std::string& text, std::vector<int> ranks) : HostMemoryError(text), missing(std::move(ranks)) {}
  std::vector<int> missing;
};

// A peer's process ended (or it closed its HostMemory) while it was needed.
struct PeerDied : HostMemoryError {
  PeerDied(const std::string& text, int local_rank, int process)
      : HostMemoryError(text), rank(local_rank), pid(process) {}
  int rank;
  int pid;
};

// Somebody called abort(), or an earlier collective failed on local rank `by`.
struct Aborted : HostMemoryError {
  Aborted(const std::string& text, int by_rank, std::string why)
      : HostMemoryError(text), by(by_rank), reason(std::move(why)) {}
  int by;
  std::string reason;
};

// What a rank called: published beside its counter and compared by every peer before any data is touched.
enum class Kind : uint8_t { allreduce, reduce_scatter, allgather, broadcast, barrier, alltoall, gather, scatter };
struct Signature {
  uint64_t sequence = 0;  // of the call, counted from 1
  uint64_t count = 0;     // elements for reductions, else bytes
  Kind kind = Kind::barrier;
  Dtype dtype = Dtype::u8;
  Op op = Op::sum;
  uint8_t between_hosts = 0;
  int32_t root = 0;
  int64_t divisor = 0;
  bool operator==(const Signature& other) const;
  uint64_t hash() const;
  std::string text() const;  // "all_reduce(sum) of 1,000 float32"
};

// Ranks called different collectives. Every rank that is in the call throws it; one that comes later, when the others
// have failed, may get Aborted with its text. `rank` is the local rank that differs from this one.
struct Mismatch : HostMemoryError {
  Mismatch(const std::string& text, int local_rank, const Signature& of_peer, const Signature& of_this)
      : HostMemoryError(text), rank(local_rank), theirs(of_peer), ours(of_this) {}
  int rank;
  Signature theirs;
  Signature ours;
};

// How long a call may wait for its peers, and what to do meanwhile.
struct Waiting {
  using Clock = std::chrono::steady_clock;
  explicit Waiting(Clock::duration timeout, std::function<void()> poll_while_waiting = {})
      : deadline(Clock::now() + timeout), poll(std::move(poll_while_waiting)) {}
  Clock::time_point deadline;
  // Called in the waiting thread before it sleeps and then every `poll_every`, e.g. to progress MPI. It may throw: the
  // collective then fails with that exception. Without it a waiting thread sleeps until it is woken.
  std::function<void()> poll;
  std::chrono::microseconds poll_every{2000};
};

// Called in local rank 0 only, with one piece of the message in shared memory (contiguous, 64-byte aligned): `count`
// elements for allreduce, bytes for broadcast. It may take its time (MPI between hosts) and may throw.
using BetweenHosts = std::function<void(void* part, size_t count)>;

struct HostMemorySettings {
  // Bytes of one slot: a rank has three. All of them should fit in the last cache; a chunk that fits in a core's own
  // cache twice over is slower, for the peer then has to ask that core for what has not been written back.
  size_t chunk_bytes = 512 * 1024;
  // Bytes of one piece handed to `between_hosts` by allreduce; local rank 0 has three. 0: allreduce takes no hook.
  size_t between_hosts_bytes = 0;
  // Largest message, in bytes times ranks, that is reduced by every rank for itself after one exchange of flags.
  size_t flat_bytes = 128 * 1024;
  // Names for messages: the ranks in the job of local ranks 0, 1, ...; empty: the local ranks themselves.
  std::vector<int> names;
  // Use a name in /dev/shm even where an unnamed segment is possible.
  bool named = false;
};

class HostMemory {
 public:
  // Local rank 0 makes the segment; throws Unavailable. Memory is taken now, so that a full /dev/shm is an error here
  // and not a SIGBUS later. On Linux it has no name in any folder (others open it through /proc), so nothing can be
  // left behind; elsewhere, or with `named`, the name goes away in ready() or in the destructor.
  static std::unique_ptr<HostMemory> create(int ranks, const HostMemorySettings& settings = {});

  // What the other ranks need: text without spaces, below 200 characters.
  const std::string& name() const;

  // The other ranks map it (rank 1..ranks-1), with the same settings as rank 0; throws Unavailable.
  static std::unique_ptr<HostMemory> attach(const std::string& name, int rank, int ranks,
                                            const HostMemorySettings& settings = {});

  // Wait until every rank has attached; then the name is removed. All ranks call it once, before the first collective.
  void ready(const Waiting& waiting);

  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  int rank() const;
  int ranks() const;

  // data[i] = op over all ranks, in place, on every rank. `divisor`: what `average` divides by (0: ranks()).
  void allreduce(void* data, size_t count, Dtype dtype, Op op, const Waiting& waiting, int64_t divisor = 0);

  // The same over several hosts. Each piece, once it is reduced over this host, is handed to `between_hosts` in local
  // rank 0, which reduces it (with a sum for `average`) over the hosts in place; then the peers take it. Meanwhile the
  // peers reduce the next piece. Rank 0 passes the hook, others pass an empty one. `divisor` is needed for an average
  // (the ranks of all hosts). float16 averages are divided before the hook (no overflow), others after it (rounded
  // once). With one rank on this host the hook gets `data` itself, in pieces of the same size as on hosts with several
  // ranks.
  void allreduce_between(void* data, size_t count, Dtype dtype, Op op, const BetweenHosts& between_hosts,
                         const Waiting& waiting, int64_t divisor = 0);

  // output[i] = op over ranks q of their inputs[rank()][i]; `inputs` are ranks() pointers to `count` elements each.
  // `output` may be inputs[rank()].
  void reduce_scatter(const void* const* inputs, void* output, size_t count, Dtype dtype, Op op, const Waiting& waiting,
                      int64_t divisor = 0);

  // outputs[q] = input of rank q, `bytes` each. outputs[rank()] may be `input`.
  void allgather(const void* input, void* const* outputs, size_t bytes, const Waiting& waiting);

  // data = data of `root`. With a hook (given in rank 0, and `between` true in all ranks), for messages that cross
  // hosts: it is called in local rank 0 with each chunk in shared memory. If root is 0, before the peers (and rank 0's
  // own `data`) take it: to receive the chunk into it, or to send it. If root is another rank, after root filled it: to
  // send it on. Chunks have the same sizes on hosts with the same settings. `named_root`: what the ranks call the root
  // and compare, where it is not on this host or goes by another number (-1: the local rank).
  void broadcast(void* data, size_t bytes, int root, const Waiting& waiting, const BetweenHosts& between_hosts = {},
                 bool between = false, int named_root = -1);

  void barrier(const Waiting& waiting);

  // All ranks of this host have come to a collective that takes another way than memory, and have called the same.
  // `count`: elements of a reduction, else bytes.
  void meet(Kind kind, size_t count, const Waiting& waiting, int root = -1, Dtype dtype = Dtype::u8, Op op = Op::sum);

  // Whether try_allreduce takes a message of this size.
  bool is_small(size_t count, Dtype dtype) const;

  // A small all-reduce (or barrier) in the calling thread if the peers come soon. True: done. False: the peers did not
  // come within `spin`; the call stays open, `data` is still needed, and finish(), possibly from another thread, must
  // be the next call. Peers may use allreduce() or barrier() for their side of it.
  bool try_allreduce(void* data, size_t count, Dtype dtype, Op op, std::chrono::microseconds spin, int64_t divisor = 0);
  bool try_barrier(std::chrono::microseconds spin);
  bool pending() const;
  void finish(const Waiting& waiting);

  // All waits of all ranks, now and later, throw Aborted with this reason (the first one counts; cut at 400
  // characters).
  void abort(const std::string& reason) noexcept;

 private:
  struct State;
  explicit HostMemory(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace dtrain
