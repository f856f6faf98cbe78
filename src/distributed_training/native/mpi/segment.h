// The memory that the ranks of a host share: its layout, how it is made and found, and how a rank waits for another.
// Used by host_memory.cpp only; HostMemory is what others see.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "host_memory.h"
#include "process.h"

namespace dtrain {

constexpr int kSlots = 3;
constexpr int kSignatures = 4;

// Counts chunks (or pieces) of all collectives from the start; only its rank raises it.
using Counter = std::atomic<uint64_t>;

// What a rank shows to its peers. Counters and the hashes of its calls share one cache line, so that a peer that waits
// learns all it needs with one miss.
struct alignas(64) RankBlock {
  Counter filled;                  // chunks whose data lie in this rank's slots
  Counter done;                    // chunks this rank has reduced or read
  Counter copied;                  // pieces between hosts that this rank has taken
  std::atomic<uint32_t> bell;      // changed to wake the peers that sleep on this rank
  std::atomic<uint32_t> sleepers;  // how many do: nobody is woken when nobody sleeps
  std::atomic<uint64_t> hashes[kSignatures];

  alignas(64) Signature signatures[kSignatures];
  std::atomic<int32_t> pid;  // 0: not attached yet
  std::atomic<uint64_t> started;
  std::atomic<uint32_t> left;
  uint64_t processors[kProcessorWords];  // that this rank may use
};

static_assert(std::atomic<uint64_t>::is_always_lock_free, "counters between processes must not need locks");
static_assert(offsetof(RankBlock, signatures) == 64, "counters and hashes are meant to share one cache line");

struct SegmentHeader {
  uint64_t magic;
  uint64_t ranks;
  uint64_t chunk_bytes;
  uint64_t between_hosts_bytes;
  std::atomic<uint32_t> abort_claimed;
  std::atomic<int32_t> aborted_by;  // 1 + rank; 0: nobody. Written after the reason.
  char reason[404];
};

// A range of ranks to wait for, without this one.
struct Peers {
  int begin;
  int end;
};

class Segment {
 public:
  static constexpr size_t kPage = 4096;

  // An empty `name` makes the segment (rank 0); otherwise it is opened.
  Segment(const std::string& name, int rank, int ranks, const HostMemorySettings& settings);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  const std::string& name() const { return name_; }
  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  size_t chunk_bytes() const { return chunk_bytes_; }
  size_t piece_bytes() const { return piece_bytes_; }
  Peers everybody() const { return {0, ranks_}; }

  RankBlock& block(int rank) const { return blocks_[rank]; }
  RankBlock& mine() const { return blocks_[rank_]; }
  uint8_t* slot(int rank, uint64_t chunk) const { return slots_ + (rank * kSlots + chunk % kSlots) * chunk_bytes_; }
  uint8_t* piece(uint64_t index) const { return pieces_ + index % kSlots * piece_bytes_; }

  // Wait until all have attached, then take the name away.
  void ready(const Waiting& waiting);

  // Raise one of this rank's counters; what was written before is seen by whoever sees the counter.
  void raise(Counter RankBlock::*counter, uint64_t value);

  // Wait until `counter` of all `peers` is at least `value`. `meanwhile` is called now and then by a wait that takes
  // long. `call` is named in errors.
  void wait(Counter RankBlock::*counter, uint64_t value, Peers peers, const Signature& call, const Waiting& waiting,
            const std::function<void()>& meanwhile = {}) const;

  // The same for at most `spin`, without sleeping: false if they did not come.
  bool wait_shortly(Counter RankBlock::*counter, uint64_t value, std::chrono::microseconds spin) const;

  void abort(const std::string& reason) noexcept;
  void throw_if_aborted() const;

  // "rank 3": the rank's name in the job.
  std::string title(int rank) const;

 private:
  bool arrived(Counter RankBlock::*counter, uint64_t value, int rank) const {
    return (blocks_[rank].*counter).load(std::memory_order_acquire) >= value;
  }
  void make();
  void open();
  void map(int file);
  void enter();
  void close_file();
  bool spin(Counter RankBlock::*counter, uint64_t value, int rank) const;
  void sleep(Counter RankBlock::*counter, uint64_t value, int rank, Peers peers, const Signature& call,
             const Waiting& waiting, const std::function<void()>& meanwhile) const;
  void throw_timed_out(Counter RankBlock::*counter, uint64_t value, Peers peers, const Signature& call) const;
  void check_alive(Counter RankBlock::*counter, uint64_t value, Peers peers, const Signature& call) const;
  void check_left(Counter RankBlock::*counter, uint64_t value, Peers peers, const Signature& call) const;
  void wake(RankBlock& block) const noexcept;

  std::string name_;
  int rank_;
  int ranks_;
  size_t chunk_bytes_;
  size_t piece_bytes_;
  size_t bytes_;
  bool named_;
  bool crowded_ = false;  // more ranks than processors: do not spin
  std::vector<int> names_;
  std::vector<bool> visible_;  // peers whose process can be looked up from here
  int file_ = -1;
  SegmentHeader* header_ = nullptr;
  RankBlock* blocks_ = nullptr;
  uint8_t* slots_ = nullptr;
  uint8_t* pieces_ = nullptr;
};

}  // namespace dtrain
