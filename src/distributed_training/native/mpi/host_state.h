// What HostMemory is made of: the state of one rank and the steps that its collectives share. Used by host_memory.cpp
// and between_hosts.cpp only.
//
// Chunks are numbered through all collectives: chunk c uses slot c % 3 of every rank, and every rank numbers them
// alike, because it makes the same calls. `filled` of a rank is above c once its data of chunk c lie in its slot,
// `done` once it has read (or reduced) chunk c. Every collective has at least one chunk and waits, after filling its
// first one g, until `filled` of all ranks is above g: the *meeting*. Whoever was seen there has finished all
// collectives before this one, and has shown its signature.
//
// Inside a collective the order of a rank is: fill(i), finish(i - 1), and for the all-reduce take(i - 2). Slot c % 3
// may be filled for chunk c once all ranks have read chunk c - 3:
//   - fill(0) comes before the meeting. The collective before ended with waiting for the peers' last chunk, c - 1; a
//     peer that has shown it had read c - 3 before (order above); and if that collective had fewer than three chunks,
//     its own meeting proves the rest.
//   - fill(1) and fill(2) come after the meeting: everything before this collective has been read.
//   - fill(i), i >= 3, waits for `done` of chunk i - 3.
// The result of a rank's part in an all-reduce lies in its own slot, in the part that it never fills (so the borders of
// parts must be the same in all chunks of a call). It is overwritten by finish(i) of the chunk three later, after
// `filled` of that chunk by every peer, which comes after its take() of this one.
#pragma once

#include <algorithm>

#include "copy.h"
#include "segment.h"

namespace dtrain {

constexpr size_t kLine = 64;
constexpr size_t kReduceBlock = 16 * 1024;

inline uint8_t* at(void* data, size_t offset) { return static_cast<uint8_t*>(data) + offset; }
inline const uint8_t* at(const void* data, size_t offset) { return static_cast<const uint8_t*>(data) + offset; }

// `count` elements in pieces of `each`, as even as whole cache lines allow, none over `bytes`; at least one piece.
struct Cut {
  Cut(size_t elements, size_t element_bytes, size_t bytes) : count(elements) {
    const size_t line = kLine / element_bytes;
    const size_t most = std::max(line, bytes / element_bytes / line * line);
    const size_t wanted = std::max<size_t>(1, (count + most - 1) / most);
    each = std::min(most, ((count + wanted - 1) / wanted + line - 1) / line * line);
    each = std::max(each, line);
    pieces = std::max<size_t>(1, (count + each - 1) / each);
  }
  size_t begin(size_t piece) const { return std::min(count, piece * each); }
  size_t length(size_t piece) const { return std::min(count, (piece + 1) * each) - begin(piece); }
  size_t count;
  size_t each;
  size_t pieces;
};

// Owner `index` of `owners` has this part of `length` elements; parts begin on cache lines. `whole` is what the borders
// are reckoned from: the length of the other chunks, where this one is the short last one.
struct Part {
  Part(size_t length, int owners, int index, size_t element_bytes, size_t whole) {
    const size_t line = kLine / element_bytes;
    const size_t each = ((whole + owners - 1) / owners + line - 1) / line * line;
    begin = std::min(length, index * each);
    count = std::min(length, begin + each) - begin;
  }
  size_t begin;
  size_t count;
};

struct HostMemory::State {
  State(const std::string& name, int rank, int ranks, const HostMemorySettings& given)
      : segment(name, rank, ranks, given), flat_bytes(given.flat_bytes), sources(ranks) {}

  Segment segment;
  size_t flat_bytes;
  uint64_t next_chunk = 1;  // attaching was number 0
  uint64_t next_piece = 0;
  Signature call;  // the current or last one
  uint64_t hash = 0;
  std::vector<const void*> sources;  // room for one pointer a rank
  struct {
    bool open = false;
    void* data = nullptr;
  } pending;

  int rank() const { return segment.rank(); }
  int ranks() const { return segment.ranks(); }

  void begin(Kind kind, size_t count, Dtype dtype, Op op, int root, int64_t divisor, bool between) {
    segment.throw_if_aborted();
    if (pending.open) {
      throw std::logic_error("HostMemory: " + call.text() + " was begun by try_allreduce and needs finish() first");
    }
    call.sequence += 1;
    call.count = count;
    call.kind = kind;
    call.dtype = dtype;
    call.op = op;
    call.between_hosts = between;
    call.root = root;
    call.divisor = divisor;
    hash = call.hash();
    RankBlock& block = segment.mine();
    block.signatures[call.sequence % kSignatures] = call;
    block.hashes[call.sequence % kSignatures].store(hash, std::memory_order_relaxed);
  }

  // Compare what this rank called with what `peer` called; the peer must have arrived.
  void compare(int peer) const {
    const RankBlock& block = segment.block(peer);
    const size_t place = call.sequence % kSignatures;
    if (block.hashes[place].load(std::memory_order_relaxed) == hash) return;
    const Signature theirs = block.signatures[place];
    throw Mismatch(segment.title(peer) + " called " + theirs.text() + ", this rank (" + segment.title(rank()) + ") " +
                       call.text() + ": all ranks must make the same calls in the same order",
                   peer, theirs, call);
  }

  void compare_arrived() const {
    for (int peer = 0; peer < ranks(); ++peer) {
      if (peer != rank() && segment.block(peer).filled.load(std::memory_order_acquire) > next_chunk) compare(peer);
    }
  }

  // All ranks are in this collective and have called the same.
  void meet(const Waiting& waiting) const {
    segment.wait(&RankBlock::filled, next_chunk + 1, segment.everybody(), call, waiting, [this] { compare_arrived(); });
    compare_arrived();
  }

  void wait_filled(size_t chunk, const Waiting& waiting, Peers peers) const {
    segment.wait(&RankBlock::filled, next_chunk + chunk + 1, peers, call, waiting);
  }

  void wait_done(size_t chunk, const Waiting& waiting, Peers peers) const {
    segment.wait(&RankBlock::done, next_chunk + chunk + 1, peers, call, waiting);
  }

  void raise_filled(size_t chunk) { segment.raise(&RankBlock::filled, next_chunk + chunk + 1); }
  void raise_done(size_t chunk) { segment.raise(&RankBlock::done, next_chunk + chunk + 1); }

  uint8_t* slot(int rank, size_t chunk) const { return segment.slot(rank, next_chunk + chunk); }

  // One exchange of flags a chunk: fill(i) writes this rank's slot, finish(i) reads everybody's.
  template <class Fill, class Finish>
  void exchange(size_t chunks, const Fill& fill, const Finish& finish, const Waiting& waiting) {
    for (size_t i = 0; i <= chunks; ++i) {
      if (i < chunks) {
        if (i >= kSlots) wait_done(i - kSlots, waiting, segment.everybody());
        fill(i);
        raise_filled(i);
      }
      if (i == 0) {
        meet(waiting);
        continue;
      }
      wait_filled(i - 1, waiting, segment.everybody());
      finish(i - 1);
      if (i - 1 + kSlots < chunks) raise_done(i - 1);
    }
    next_chunk += chunks;
  }

  // Run a collective; if it fails, tell the peers, who cannot go on either.
  template <class Body>
  void run(const Body& body) {
    try {
      body();
    } catch (const Aborted&) {
      throw;
    } catch (const std::exception& error) {
      segment.abort(error.what());
      throw;
    } catch (...) {
      segment.abort(call.text() + " failed in " + segment.title(rank()));
      throw;
    }
  }

  bool is_flat(size_t bytes) const { return bytes <= segment.chunk_bytes() && bytes * ranks() <= flat_bytes; }

  void reduce_flat(void* data) {
    for (int peer = 0; peer < ranks(); ++peer) sources[peer] = peer == rank() ? data : slot(peer, 0);
    reduce_many(data, sources.data(), ranks(), call.count, call.dtype, call.op, call.divisor);
  }

  void allreduce_flat(void* data, size_t bytes, const Waiting& waiting) {
    exchange(
        1, [&](size_t) { copy(slot(rank(), 0), data, bytes); }, [&](size_t) { reduce_flat(data); }, waiting);
  }

  // Reduce this rank's part of a chunk from the peers' slots and its own data; the result goes to both.
  void reduce_part(uint8_t* data, size_t chunk, const Part& part, size_t element) {
    const size_t block = kReduceBlock / element;
    uint8_t* result = slot(rank(), chunk);
    for (size_t done = 0; done < part.count; done += block) {
      const size_t count = std::min(block, part.count - done);
      const size_t offset = (part.begin + done) * element;
      for (int peer = 0; peer < ranks(); ++peer) sources[peer] = (peer == rank() ? data : slot(peer, chunk)) + offset;
      reduce_many(result + offset, sources.data(), ranks(), count, call.dtype, call.op, call.divisor);
      copy(data + offset, result + offset, count * element);
    }
  }

  void allreduce_chunked(void* data, size_t count, size_t element, const Waiting& waiting) {
    const Cut cut(count, element, segment.chunk_bytes());
    const auto for_others = [&](size_t chunk, const auto& action) {
      for (int peer = 0; peer < ranks(); ++peer) {
        if (peer == rank()) continue;
        const Part part(cut.length(chunk), ranks(), peer, element, cut.each);
        action(peer, at(data, (cut.begin(chunk) + part.begin) * element), part.begin * element, part.count * element);
      }
    };
    for (size_t i = 0; i < cut.pieces + 2; ++i) {
      if (i < cut.pieces) {
        for_others(
            i, [&](int, uint8_t* mine, size_t offset, size_t bytes) { copy(slot(rank(), i) + offset, mine, bytes); });
        raise_filled(i);
      }
      if (i == 0) meet(waiting);
      if (i >= 1 && i <= cut.pieces) {
        const size_t chunk = i - 1;
        wait_filled(chunk, waiting, segment.everybody());
        const Part part(cut.length(chunk), ranks(), rank(), element, cut.each);
        reduce_part(at(data, cut.begin(chunk) * element), chunk, part, element);
        raise_done(chunk);
      }
      if (i >= 2) {
        const size_t chunk = i - 2;
        wait_done(chunk, waiting, segment.everybody());
        for_others(chunk, [&](int peer, uint8_t* mine, size_t offset, size_t bytes) {
          copy(mine, slot(peer, chunk) + offset, bytes);
        });
      }
    }
    next_chunk += cut.pieces;
  }

  // In between_hosts.cpp: local rank 0's side of an all-reduce over hosts, and the others'.
  struct Between;
  struct Step;
  void lead(const Between& job, const BetweenHosts& hook, const Waiting& waiting);
  void follow(const Between& job, const Waiting& waiting);
  void fill_piece(const Between& job, size_t piece, const Waiting& waiting);
  void take_piece(const Between& job, size_t piece, const Waiting& waiting);
  void fill_step(const Between& job, size_t index);
  void reduce_step(const Between& job, size_t index);

  // An all-reduce or barrier that is tried in the calling thread.
  bool attempt(void* data, size_t bytes, std::chrono::microseconds spin) {
    bool came = false;
    run([&] {
      copy(slot(rank(), 0), data, bytes);
      raise_filled(0);
      came = segment.wait_shortly(&RankBlock::filled, next_chunk + 1, spin);
      compare_arrived();
      pending.open = true;
      pending.data = data;
      if (came) conclude();
    });
    return came;
  }

  void conclude() {
    pending.open = false;
    // Everybody has filled its only chunk and called the same.
    if (call.kind == Kind::allreduce) reduce_flat(pending.data);
    next_chunk += 1;
  }
};

}  // namespace dtrain
