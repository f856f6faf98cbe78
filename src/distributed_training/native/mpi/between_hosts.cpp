// The way of an all-reduce over hosts. Local rank 0 (the leader) puts its data of a piece in shared memory; the other
// ranks own the parts of it and add theirs in place, exchanging among themselves through their slots, chunk by chunk;
// then the leader goes between the hosts with it while the others are at the next piece, and all take the result.
// Chunks are numbered so that each piece has `steps` of them; the leader's counters move by whole pieces.
#include "host_state.h"

namespace dtrain {

struct HostMemory::State::Between {
  void* data;
  size_t element;
  Cut cut;       // the message in pieces
  size_t each;   // elements of a chunk
  size_t steps;  // chunks of a piece
  Op op;         // what the owners do: a sum for most averages
  bool late;     // divide after the hook
};

void HostMemory::State::fill_piece(const Between& job, size_t piece, const Waiting& waiting) {
  const uint64_t index = next_piece + piece;
  if (index >= kSlots) segment.wait(&RankBlock::copied, index - kSlots + 1, segment.everybody(), call, waiting);
  copy(segment.piece(index), at(job.data, job.cut.begin(piece) * job.element), job.cut.length(piece) * job.element);
  raise_filled((piece + 1) * job.steps - 1);
}

void HostMemory::State::lead(const Between& job, const BetweenHosts& hook, const Waiting& waiting) {
  fill_piece(job, 0, waiting);
  meet(waiting);
  for (size_t piece = 0; piece < job.cut.pieces; ++piece) {
    if (piece + 1 < job.cut.pieces) fill_piece(job, piece + 1, waiting);
    const size_t last = (piece + 1) * job.steps - 1;
    wait_done(last, waiting, segment.everybody());
    uint8_t* shared = segment.piece(next_piece + piece);
    const size_t count = job.cut.length(piece);
    if (count != 0) {
      hook(shared, count);
      if (job.late) divide(shared, count, call.dtype, call.divisor);
    }
    raise_done(last);
    copy(at(job.data, job.cut.begin(piece) * job.element), shared, count * job.element);
  }
}

// Chunk `step` of the message: elements [begin, begin + count) of a piece.
struct HostMemory::State::Step {
  Step(const Between& job, size_t step) : piece(step / job.steps) {
    const size_t length = job.cut.length(piece);
    begin = std::min(length, step % job.steps * job.each);
    count = std::min(length, begin + job.each) - begin;
  }
  size_t piece;
  size_t begin;
  size_t count;
};

void HostMemory::State::fill_step(const Between& job, size_t index) {
  const Step step(job, index);
  for (int peer = 1; peer < ranks(); ++peer) {
    if (peer == rank()) continue;
    const Part part(step.count, ranks() - 1, peer - 1, job.element, step.count);
    const size_t from = job.cut.begin(step.piece) + step.begin + part.begin;
    copy(slot(rank(), index) + part.begin * job.element, at(job.data, from * job.element), part.count * job.element);
  }
}

void HostMemory::State::reduce_step(const Between& job, size_t index) {
  const Step step(job, index);
  const Part part(step.count, ranks() - 1, rank() - 1, job.element, step.count);
  const size_t in_piece = step.begin + part.begin;
  uint8_t* shared = segment.piece(next_piece + step.piece) + in_piece * job.element;
  sources[0] = shared;
  for (int peer = 1; peer < ranks(); ++peer) sources[peer] = slot(peer, index) + part.begin * job.element;
  sources[rank()] = at(job.data, (job.cut.begin(step.piece) + in_piece) * job.element);
  reduce_many(shared, sources.data(), ranks(), part.count, call.dtype, job.op, call.divisor);
}

void HostMemory::State::take_piece(const Between& job, size_t piece, const Waiting& waiting) {
  wait_done((piece + 1) * job.steps - 1, waiting, Peers{0, 1});
  copy(at(job.data, job.cut.begin(piece) * job.element), segment.piece(next_piece + piece),
       job.cut.length(piece) * job.element);
  segment.raise(&RankBlock::copied, next_piece + piece + 1);
}

void HostMemory::State::follow(const Between& job, const Waiting& waiting) {
  const Peers owners{1, ranks()};
  const size_t total = job.cut.pieces * job.steps;
  for (size_t i = 0; i <= total; ++i) {
    if (i < total) {
      if (i >= kSlots) wait_done(i - kSlots, waiting, owners);
      fill_step(job, i);
      raise_filled(i);
    }
    if (i == 0) {
      meet(waiting);
      continue;
    }
    const size_t piece = (i - 1) / job.steps;
    wait_filled(i - 1, waiting, owners);
    wait_filled((piece + 1) * job.steps - 1, waiting, Peers{0, 1});
    reduce_step(job, i - 1);
    raise_done(i - 1);
    if (i % job.steps == 0 && piece > 0) take_piece(job, piece - 1, waiting);
  }
  take_piece(job, job.cut.pieces - 1, waiting);
}

void HostMemory::allreduce_between(void* data, size_t count, Dtype dtype, Op op, const BetweenHosts& between_hosts,
                                   const Waiting& waiting, int64_t divisor) {
  State& state = *state_;
  require_supported(dtype, op);
  if (state.segment.piece_bytes() == 0) throw std::logic_error("HostMemory was made without between_hosts_bytes");
  if (rank() == 0 && !between_hosts) throw std::invalid_argument("local rank 0 needs a way between the hosts");
  if (op == Op::average && divisor <= 0) throw std::invalid_argument("an average over hosts needs a divisor");
  if (op != Op::average) divisor = 0;
  const size_t element = size_of(dtype);
  const bool early = op == Op::average && dtype == Dtype::f16;
  const bool late = op == Op::average && !early;
  const Cut cut(count, element, state.segment.piece_bytes());
  const size_t each = state.segment.chunk_bytes() / element;
  state.begin(Kind::allreduce, count, dtype, op, 0, divisor, true);
  const State::Between job{data, element, cut, each, std::max<size_t>(1, (cut.each + each - 1) / each),
                           late ? Op::sum : op, late};
  state.run([&] {
    if (ranks() == 1) {
      for (size_t piece = 0; piece < cut.pieces && count != 0; ++piece) {
        uint8_t* start = at(data, cut.begin(piece) * element);
        if (early) divide(start, cut.length(piece), dtype, divisor);
        between_hosts(start, cut.length(piece));
        if (late) divide(start, cut.length(piece), dtype, divisor);
      }
      return;
    }
    rank() == 0 ? state.lead(job, between_hosts, waiting) : state.follow(job, waiting);
    state.next_chunk += cut.pieces * job.steps;
    state.next_piece += cut.pieces;
  });
}

}  // namespace dtrain
