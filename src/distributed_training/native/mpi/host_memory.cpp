#include "host_memory.h"

#include "host_state.h"

namespace dtrain {

HostMemory::HostMemory(std::unique_ptr<State> state) : state_(std::move(state)) {}
HostMemory::~HostMemory() = default;

std::unique_ptr<HostMemory> HostMemory::create(int ranks, const HostMemorySettings& settings) {
  return std::unique_ptr<HostMemory>(new HostMemory(std::make_unique<State>("", 0, ranks, settings)));
}

std::unique_ptr<HostMemory> HostMemory::attach(const std::string& name, int rank, int ranks,
                                               const HostMemorySettings& settings) {
  if (name.empty()) throw std::invalid_argument("attaching to shared memory needs the name that rank 0 made");
  return std::unique_ptr<HostMemory>(new HostMemory(std::make_unique<State>(name, rank, ranks, settings)));
}

const std::string& HostMemory::name() const { return state_->segment.name(); }
int HostMemory::rank() const { return state_->rank(); }
int HostMemory::ranks() const { return state_->ranks(); }
bool HostMemory::pending() const { return state_->pending.open; }
void HostMemory::abort(const std::string& reason) noexcept { state_->segment.abort(reason); }

void HostMemory::ready(const Waiting& waiting) {
  state_->run([&] { state_->segment.ready(waiting); });
}

void HostMemory::allreduce(void* data, size_t count, Dtype dtype, Op op, const Waiting& waiting, int64_t divisor) {
  State& state = *state_;
  require_supported(dtype, op);
  divisor = op != Op::average ? 0 : divisor > 0 ? divisor : ranks();
  state.begin(Kind::allreduce, count, dtype, op, 0, divisor, false);
  if (ranks() == 1) {
    if (divisor > 1) divide(data, count, dtype, divisor);
    return;
  }
  const size_t element = size_of(dtype);
  state.run([&] {
    if (state.is_flat(count * element)) {
      state.allreduce_flat(data, count * element, waiting);
    } else {
      state.allreduce_chunked(data, count, element, waiting);
    }
  });
}

void HostMemory::reduce_scatter(const void* const* inputs, void* output, size_t count, Dtype dtype, Op op,
                                const Waiting& waiting, int64_t divisor) {
  State& state = *state_;
  require_supported(dtype, op);
  divisor = op != Op::average ? 0 : divisor > 0 ? divisor : ranks();
  state.begin(Kind::reduce_scatter, count, dtype, op, 0, divisor, false);
  const size_t element = size_of(dtype);
  const Cut cut(count, element, state.segment.chunk_bytes() / ranks());
  const size_t stride = cut.each * element;
  const auto fill = [&](size_t i) {
    for (int peer = 0; peer < ranks(); ++peer) {
      if (peer == rank()) continue;
      copy(state.slot(rank(), i) + peer * stride, at(inputs[peer], cut.begin(i) * element), cut.length(i) * element);
    }
  };
  const auto finish = [&](size_t i) {
    for (int peer = 0; peer < ranks(); ++peer) state.sources[peer] = state.slot(peer, i) + rank() * stride;
    state.sources[rank()] = at(inputs[rank()], cut.begin(i) * element);
    reduce_many(at(output, cut.begin(i) * element), state.sources.data(), ranks(), cut.length(i), dtype, op, divisor);
  };
  state.run([&] { state.exchange(cut.pieces, fill, finish, waiting); });
}

void HostMemory::allgather(const void* input, void* const* outputs, size_t bytes, const Waiting& waiting) {
  State& state = *state_;
  state.begin(Kind::allgather, bytes, Dtype::u8, Op::sum, 0, 0, false);
  const Cut cut(bytes, 1, state.segment.chunk_bytes());
  const auto fill = [&](size_t i) { copy(state.slot(rank(), i), at(input, cut.begin(i)), cut.length(i)); };
  const auto finish = [&](size_t i) {
    for (int peer = 0; peer < ranks(); ++peer) {
      const void* from = peer == rank() ? at(input, cut.begin(i)) : state.slot(peer, i);
      copy(at(outputs[peer], cut.begin(i)), from, cut.length(i));
    }
  };
  state.run([&] { state.exchange(cut.pieces, fill, finish, waiting); });
}

void HostMemory::broadcast(void* data, size_t bytes, int root, const Waiting& waiting,
                           const BetweenHosts& between_hosts, bool between, int named_root) {
  State& state = *state_;
  if (root < 0 || root >= ranks()) throw std::invalid_argument("broadcast from local rank " + std::to_string(root));
  if (rank() == 0 && between && !between_hosts)
    throw std::invalid_argument("local rank 0 needs a way between the hosts");
  state.begin(Kind::broadcast, bytes, Dtype::u8, Op::sum, named_root < 0 ? root : named_root, 0, between);
  const Cut cut(bytes, 1, state.segment.chunk_bytes());
  const bool hook = between && rank() == 0;
  const auto fill = [&](size_t i) {
    if (rank() != root) return;
    copy(state.slot(root, i), at(data, cut.begin(i)), cut.length(i));
    if (hook && cut.length(i) != 0) between_hosts(state.slot(root, i), cut.length(i));
  };
  const auto finish = [&](size_t i) {
    if (hook && root != 0 && cut.length(i) != 0) between_hosts(state.slot(root, i), cut.length(i));
    if (rank() != root || hook) copy(at(data, cut.begin(i)), state.slot(root, i), cut.length(i));
  };
  state.run([&] { state.exchange(cut.pieces, fill, finish, waiting); });
}

void HostMemory::barrier(const Waiting& waiting) { meet(Kind::barrier, 0, waiting); }

void HostMemory::meet(Kind kind, size_t count, const Waiting& waiting, int root, Dtype dtype, Op op) {
  State& state = *state_;
  state.begin(kind, count, dtype, op, root, 0, false);
  const auto nothing = [](size_t) {};
  state.run([&] { state.exchange(1, nothing, nothing, waiting); });
}

bool HostMemory::is_small(size_t count, Dtype dtype) const {
  return ranks() == 1 || state_->is_flat(count * size_of(dtype));
}

bool HostMemory::try_allreduce(void* data, size_t count, Dtype dtype, Op op, std::chrono::microseconds spin,
                               int64_t divisor) {
  State& state = *state_;
  require_supported(dtype, op);
  if (!is_small(count, dtype)) throw std::invalid_argument("try_allreduce takes messages for which is_small() is true");
  divisor = op != Op::average ? 0 : divisor > 0 ? divisor : ranks();
  state.begin(Kind::allreduce, count, dtype, op, 0, divisor, false);
  if (ranks() == 1) {
    if (divisor > 1) divide(data, count, dtype, divisor);
    return true;
  }
  return state.attempt(data, count * size_of(dtype), spin);
}

bool HostMemory::try_barrier(std::chrono::microseconds spin) {
  State& state = *state_;
  state.begin(Kind::barrier, 0, Dtype::u8, Op::sum, -1, 0, false);
  return state.attempt(nullptr, 0, spin);
}

void HostMemory::finish(const Waiting& waiting) {
  State& state = *state_;
  if (!state.pending.open) throw std::logic_error("HostMemory::finish() without an open try_allreduce()");
  state.pending.open = false;
  state.run([&] {
    state.meet(waiting);
    state.conclude();
  });
}

}  // namespace dtrain
