#include "group.h"

#include <algorithm>
#include <cstring>

#include "host_memory.h"

namespace dtrain {

namespace {

void check_root(int root, int size) {
  if (root < 0 || root >= size) {
    throw std::invalid_argument("root " + std::to_string(root) + " is not a rank of a group of " +
                                std::to_string(size));
  }
}

void check_supported(Dtype dtype, Op op) {
  if (!supports(dtype, op)) {
    throw std::invalid_argument(std::string("cannot reduce ") + name_of(dtype) + " by " + name_of(op));
  }
}

}  // namespace

void Group::allreduce(void* data, size_t count, Dtype dtype, Op op, Timeout timeout) {
  check_supported(dtype, op);
  if (size() == 1) return;
  begin(Call::allreduce, count, dtype, op);
  reduce(data, count, dtype, op, timeout);
}

void Group::reduce(void* data, size_t count, Dtype dtype, Op op, Timeout timeout) {
  if (in_memory()) return memory_->allreduce(data, count, dtype, op, waiting(timeout));
  if (!memory_) return everybody_->allreduce(data, count, dtype, op, size(), deadline(timeout));
  BetweenHosts hook;
  if (Channel* leaders = leaders_.get()) {
    auto end = deadline(timeout);
    Op inner = op == Op::average ? Op::sum : op;
    hook = [=](void* part, size_t length) { leaders->allreduce(part, length, dtype, inner, 0, end); };
  }
  memory_->allreduce_between(data, count, dtype, op, hook, waiting(timeout), size());
}

void Group::allreduce_compressed(float* data, size_t count, Wire wire, bool average, Timeout timeout) {
  // Inside a host nothing travels on a wire: full precision.
  const Op op = average ? Op::average : Op::sum;
  if (size() == 1 || in_memory()) return allreduce(data, count, Dtype::f32, op, timeout);
  begin(Call::allreduce, count, Dtype::f32, op, static_cast<uint8_t>(wire));
  if (!memory_) {
    return everybody_->allreduce_compressed(data, count, wire, average ? size() : 1, deadline(timeout));
  }
  BetweenHosts hook;
  if (Channel* leaders = leaders_.get()) {
    auto end = deadline(timeout);
    hook = [=](void* part, size_t length) {
      leaders->allreduce_compressed(static_cast<float*>(part), length, wire, 1, end);
    };
  }
  memory_->allreduce_between(data, count, Dtype::f32, op, hook, waiting(timeout), size());
}

void Group::reduce_scatter(const void* const* inputs, void* output, size_t count, Dtype dtype, Op op, Timeout timeout) {
  check_supported(dtype, op);
  if (size() == 1) {
    if (output != inputs[0]) std::memcpy(output, inputs[0], count * size_of(dtype));
    return;
  }
  begin(Call::reduce_scatter, count, dtype, op);
  if (in_memory()) {
    memory_->reduce_scatter(inputs, output, count, dtype, op, waiting(timeout));
  } else {
    const auto end = deadline(timeout);
    if (memory_) memory_->meet(Kind::reduce_scatter, count, waiting(timeout), -1, dtype, op);
    everybody_->reduce_scatter(inputs, output, count, dtype, op, size(), end);
  }
}

void Group::allgather(const void* input, void* const* outputs, size_t bytes, Timeout timeout) {
  if (size() == 1) {
    if (outputs[0] != input) std::memcpy(outputs[0], input, bytes);
    return;
  }
  begin(Call::allgather, bytes);
  if (in_memory()) {
    memory_->allgather(input, outputs, bytes, waiting(timeout));
  } else {
    const auto end = deadline(timeout);
    if (memory_) memory_->meet(Kind::allgather, bytes, waiting(timeout));
    everybody_->allgather(input, outputs, bytes, end);
  }
}

void Group::broadcast(void* data, size_t bytes, int root, Timeout timeout) {
  check_root(root, size());
  if (size() == 1) return;
  begin(Call::broadcast, bytes, root);
  if (!memory_) return everybody_->broadcast(data, bytes, root, deadline(timeout));
  const bool here = host_of_[root] == host_of_[rank()];
  const int local_root = here ? static_cast<int>(std::find(local_.begin(), local_.end(), root) - local_.begin()) : 0;
  if (hosts_ == 1) return memory_->broadcast(data, bytes, local_root, waiting(timeout), {}, false, root);
  BetweenHosts hook;
  if (Channel* leaders = leaders_.get()) {
    auto end = deadline(timeout);
    const int host = host_of_[root];
    hook = [=](void* part, size_t length) { leaders->broadcast(part, length, host, end); };
  }
  memory_->broadcast(data, bytes, local_root, waiting(timeout), hook, true, root);
}

void Group::barrier(Timeout timeout) {
  if (size() == 1) return;
  begin(Call::barrier, 0);
  if (!memory_) return everybody_->barrier(deadline(timeout));
  if (hosts_ == 1) return memory_->barrier(waiting(timeout));
  uint8_t arrived = 1;  // an all-reduce of one byte: nobody has the result before everybody has come
  reduce(&arrived, 1, Dtype::u8, Op::bor, timeout);
}

void Group::alltoall(const std::vector<Channel::Piece>& sends, const std::vector<Channel::Piece>& receives,
                     Timeout timeout) {
  if (size() == 1) {
    std::memmove(receives.at(0).data, sends.at(0).data, std::min(sends.at(0).bytes, receives.at(0).bytes));
    return;
  }
  begin(Call::alltoall, Call::kAnyCount);
  const auto end = deadline(timeout, false);
  if (memory_) memory_->meet(Kind::alltoall, 0, waiting(timeout));
  everybody_->alltoall(sends, receives, end);
}

void Group::gather(const void* input, void* const* outputs, size_t bytes, int root, Timeout timeout) {
  check_root(root, size());
  if (size() == 1) {
    if (outputs[0] != input) std::memcpy(outputs[0], input, bytes);
    return;
  }
  begin(Call::gather, bytes, root);
  const auto end = deadline(timeout, false);
  if (memory_) memory_->meet(Kind::gather, bytes, waiting(timeout), root);
  everybody_->gather(input, outputs, bytes, root, end);
}

void Group::scatter(const void* const* inputs, void* output, size_t bytes, int root, Timeout timeout) {
  check_root(root, size());
  if (size() == 1) {
    if (output != inputs[0]) std::memcpy(output, inputs[0], bytes);
    return;
  }
  begin(Call::scatter, bytes, root);
  const auto end = deadline(timeout, false);
  if (memory_) memory_->meet(Kind::scatter, bytes, waiting(timeout), root);
  everybody_->scatter(inputs, output, bytes, root, end);
}

}  // namespace dtrain
