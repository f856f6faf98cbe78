// Collectives between processes over MPI, made of sends and receives that are polled.
//
// Why not MPI_Allreduce and its kind: they cannot be given up when a peer hangs, their order of additions depends on
// the library, and they know neither bfloat16 nor our wire formats. An all-reduce here is "each rank owns a part": the
// parts go to their owners, who add them in the order of ranks (half precision in float32, rounded once), and come
// back. The same bits on every rank, the same traffic as the best of MPI's own, and compression is the same algorithm
// with other bytes.
//
// Every collective also sends a header that says what is called, and what was called before. Where two ranks differ both
// learn what the other called. All methods belong to whoever has MPI (engine.h).
//
// channel_allreduce.cpp has the all-reduce, channel.cpp the others and what all share.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "calls.h"
#include "codec.h"
#include "engine.h"
#include "reduce.h"
#include "requests.h"

namespace dtrain {

/// The deadline has passed; `missing` are the ranks (of the channel) from which something was still to come.
struct Late : std::runtime_error {
  Late(const std::string& text, std::vector<int> ranks) : std::runtime_error(text), missing(std::move(ranks)) {}
  std::vector<int> missing;
};

/// Two ranks called different things.
struct Differs : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Channel {
 public:
  struct Piece {
    int peer;
    void* data;
    size_t bytes;
  };

  /// `names`: how messages call the ranks. `calls`: those of the group, which outlives this. `poll`: called while
  /// waiting; may throw to end the wait.
  Channel(MPI_Comm comm, std::vector<int> names, const Calls& calls, std::function<void()> poll);

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
  // What is sent to everybody at once begins in the message of its header, with up to so many bytes.
  static constexpr size_t kHead = 8 * 1024;
  // Room for a header with such a beginning: whichever of the two a peer sends, it fits, and tells what was called.
  static constexpr size_t kSlot = sizeof(Header) + kHead;
  // Libraries send messages up to some 64 KB at once and ask first for longer ones, which costs more than a few messages
  // do.
  static constexpr size_t kPiece = 56 * 1024;
  static size_t cut_of(size_t bytes) { return bytes <= 512 * 1024 ? kPiece : kMessage; }
  // Bytes that one rank owns of a round: enough to fill a network for longer than the reduction of the round before
  // takes.
  static constexpr size_t kPart = 1024 * 1024;

  struct Parts;
  void exchange(Call call, const std::vector<Piece>& sends, const std::vector<Piece>& receives,
                Clock::time_point deadline);
  uint8_t* slot(int peer) { return slots_.data() + kSlot * peer; }
  void receive_header(Requests& requests, int peer);
  void send_header(Requests& requests, int peer, const Call& call);
  /// Throws Differs if what has come from these peers is not this call.
  void check_headers(const Call& call, const std::vector<int>& from) const;
  void wait(Requests& requests, Clock::time_point deadline);
  /// Runs `body`; where it fails while headers tell of different calls, that is the error.
  template <class Body, class Check>
  static void explained(const Body& body, const Check& check) {
    try {
      body();
    } catch (const MpiError&) {
      check();  // a message that does not fit: better to say what was called than that it was too long
      throw;
    } catch (const Late&) {
      check();
      throw;
    }
    check();
  }
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
  const Calls& calls_;
  std::function<void()> poll_;
  uint64_t number_ = 0;
  // Buffers of messages live as long as the channel: a message given up may still be written by MPI.
  std::vector<Header> headers_out_;
  std::vector<uint8_t> slots_;  // one of each rank
  std::vector<uint8_t> flat_, received_, encoded_, reply_;
};

}  // namespace dtrain
