// Collectives between processes over MPI, made of sends and receives that are polled.
//
// Why not MPI_Allreduce and its kind: they cannot be given up when a peer hangs, their order of additions depends on
// the library, and they know neither bfloat16 nor our wire formats. An all-reduce here is "each rank owns a part": the
// parts go to their owners, who add them in the order of ranks (half precision in float32, rounded once), and come
// back. The same bits on every rank, the same traffic as the best of MPI's own, and compression is the same algorithm
// with other bytes.
//
// Every collective also sends a header that says what is called. Where two ranks differ both learn what the other
// called. All methods belong to the communication thread.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "codec.h"
#include "engine.h"
#include "reduce.h"

namespace dtrain {

/// What a rank calls, as it travels ahead of the data.
struct Call {
  enum Kind : uint8_t { allreduce, reduce_scatter, allgather, broadcast, barrier, alltoall, gather, scatter };
  uint64_t number = 0;  // of the call on this channel
  uint64_t count = 0;   // elements, or bytes where nothing is reduced (alltoall: between these two ranks)
  Kind kind = barrier;
  uint8_t dtype = 0;
  uint8_t op = 0;
  uint8_t wire = 255;
  int32_t root = -1;
  bool operator==(const Call& other) const;
  std::string text() const;
};

/// The deadline has passed; `missing` are the ranks (of the channel) from which something was still to come.
struct Late : std::runtime_error {
  Late(const std::string& text, std::vector<int> ranks) : std::runtime_error(text), missing(std::move(ranks)) {}
  std::vector<int> missing;
};

/// Two ranks called different things.
struct Differs : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// One MPI call takes an int; messages of 2^30 bytes stay clear of its end.
constexpr size_t kMessage = size_t{1} << 30;

/// Sends and receives that are waited for together.
class Requests {
 public:
  /// In messages of `cut` bytes; the receiver must cut as the sender does.
  void send(MPI_Comm comm, int peer, int tag, const void* data, size_t bytes, size_t cut = kMessage);
  void receive(MPI_Comm comm, int peer, int tag, void* data, size_t bytes, size_t cut = kMessage);
  bool empty() const { return requests_.empty(); }
  /// True when all are done (and forgets them). Throws MpiError.
  bool test();
  /// The peers of those that are not done.
  std::vector<int> open() const;
  /// Bytes of the last receive that test() has seen complete and who sent it.
  const MPI_Status& last() const { return last_; }

 private:
  std::vector<MPI_Request> requests_;
  std::vector<MPI_Status> statuses_;
  std::vector<int> peers_;
  MPI_Status last_{};
};

class Channel {
 public:
  struct Piece {
    int peer;
    void* data;
    size_t bytes;
  };

  /// `names`: how messages call the ranks. `poll`: called while waiting; may throw to end the wait.
  Channel(MPI_Comm comm, std::vector<int> names, std::function<void()> poll);

  int rank() const { return rank_; }
  int size() const { return size_; }

  /// In place. `divisor`: what Op::average divides by.
  void allreduce(void* data, size_t count, Dtype dtype, Op op, int64_t divisor, Clock::time_point deadline);
  /// A sum of float32 that travels as `wire`. The same bits on every rank.
  void allreduce_compressed(float* data, size_t count, Wire wire, int64_t divisor, Clock::time_point deadline);
  /// output = this rank's share of the sum of `inputs`, one per rank.
  void reduce_scatter(const void* const* inputs, void* output, size_t count, Dtype dtype, Op op, int64_t divisor,
                      Clock::time_point deadline);
  void allgather(const void* input, void* const* outputs, size_t bytes, Clock::time_point deadline);
  void broadcast(void* data, size_t bytes, int root, Clock::time_point deadline);
  void barrier(Clock::time_point deadline);
  /// Pieces to and from every rank; sizes may differ, but both sides of each piece must agree on it.
  void alltoall(const std::vector<Piece>& sends, const std::vector<Piece>& receives, Clock::time_point deadline);
  /// `outputs` on the root only. `scatter`: `inputs` on the root only.
  void gather(const void* input, void* const* outputs, size_t bytes, int root, Clock::time_point deadline);
  void scatter(const void* const* inputs, void* output, size_t bytes, int root, Clock::time_point deadline);

 private:
  struct Parts;
  void exchange(Call call, const std::vector<Piece>& sends, const std::vector<Piece>& receives,
                Clock::time_point deadline);
  void post_headers(Requests& requests, const Call& call, const std::vector<int>& to, const std::vector<int>& from,
                    int tag);
  void check_headers(const Call& call, const std::vector<int>& from) const;
  void wait(Requests& requests, Clock::time_point deadline);
  void allreduce_flat(void* data, size_t count, Dtype dtype, Op op, int64_t divisor, Clock::time_point deadline);
  /// The rounds that allreduce and allreduce_compressed share.
  void rounds(Parts& parts, const Call& call, Clock::time_point deadline);
  Call numbered(Call call);
  int tag() const { return static_cast<int>(number_ % 4096) * 4; }
  std::string name(int rank) const { return std::to_string(names_[rank]); }
  std::vector<int> others() const;
  uint8_t* scratch(std::vector<uint8_t>& buffer, size_t bytes);

  MPI_Comm comm_;
  int rank_ = 0, size_ = 1;
  std::vector<int> names_;
  std::function<void()> poll_;
  uint64_t number_ = 0;
  // Buffers of messages live as long as the channel: a message given up may still be written by MPI.
  std::vector<Call> headers_out_;
  std::vector<uint8_t> slots_;  // one for the header (and the short message) of each rank
  std::vector<uint8_t> flat_, received_, encoded_, reply_;
};

}  // namespace dtrain
