// What the ranks of a group call, so that they can compare it: all must call the same in the same order.
//
// Collectives that take the same way find a difference at once, by the header that travels with their data (Channel) or
// by the signature in shared memory (HostMemory). Two things would escape them: calls that take different ways, so that
// everybody waits for something that is not coming; and calls that end on one side without an answer from the other,
// as the broadcasts of two ranks that both think themselves the root. For the first, a rank that has waited for a
// while tells the others what it is in (notices.h). For the second, every header also says what was called before.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace dtrain {

/// A collective as one rank called it.
struct Call {
  static constexpr uint64_t kAnyCount = UINT64_MAX;  // an all-to-all: every pair of ranks has its own
  enum Kind : uint8_t { allreduce, reduce_scatter, allgather, broadcast, barrier, alltoall, gather, scatter };
  uint64_t number = 0;  // of the call on its channel or in its group; 0: none
  uint64_t count = 0;   // elements, or bytes where nothing is reduced
  Kind kind = barrier;
  uint8_t dtype = 0;
  uint8_t op = 0;
  uint8_t wire = 255;
  int32_t root = -1;
  bool operator==(const Call& other) const;
  bool operator!=(const Call& other) const { return !(*this == other); }
  uint64_t hash() const;
  /// "all_reduce(sum) of 1,000 float32"
  std::string text() const;
};

/// What travels ahead of the data of a collective.
struct Header {
  Call call;
  Call before;         // the call of the group before this one
  uint64_t chain = 0;  // stands for all calls of the group before this one
};

/// "rank 1 called a, this rank (0) called b; ..."
std::string difference(const std::string& their_name, const Call& theirs, const std::string& own_name, const Call& own);

/// The calls of a group that this rank has made, and what others have told about theirs. Any thread.
class Calls {
 public:
  using Clock = std::chrono::steady_clock;
  /// What another rank has called in the place of a call of this rank.
  struct Other {
    int rank;
    Call theirs;
    Call own;
  };

  /// This rank makes a call, which gets its number here. Gives the different one of another rank, if one is known.
  std::optional<Other> add(Call call);
  /// Another rank tells what it is in. Gives this rank's call of that number if it was a different one; a call that this
  /// rank has not reached is kept for add().
  std::optional<Other> hear(int rank, const Call& theirs);
  /// The newest call, once, if it is older than `age`: what to tell the others.
  std::optional<Call> untold(Clock::duration age);
  /// What a header says beside the call itself.
  Header header(const Call& call) const;

 private:
  static constexpr size_t kKept = 64;    // own calls that others may still be in
  static constexpr size_t kHeard = 256;  // calls of others that this rank has not reached

  mutable std::mutex mutex_;
  std::array<Call, kKept> made_;
  uint64_t number_ = 0;
  uint64_t chain_ = 0, chain_before_ = 0;
  Clock::time_point since_;
  bool told_ = false;
  std::vector<std::pair<int, Call>> heard_;
};

}  // namespace dtrain
