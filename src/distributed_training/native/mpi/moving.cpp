// The collectives of MpiBackend that only move bytes: what torch's arguments mean in terms of a Group.
#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>

#include "arguments.h"
#include "backend.h"

namespace dtrain {

MpiBackend::WorkPtr MpiBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  check_one(tensors, "broadcast");
  TORCH_CHECK(options.rootRank >= 0 && options.rootRank < size_, "broadcast: rank ", options.rootRank,
              " is not in a group of ", size_);
  const int root = static_cast<int>(options.rootRank), rank = rank_;
  auto tensor = tensors[0];
  return submit({c10d::OpType::BROADCAST, "broadcast", tensors, {}, options.timeout, !options.asyncOp},
                [=](Running& run) {
                  const auto use = rank == root ? Stage::Use::read : Stage::Use::write;
                  void* data = run.stage.place(tensor, use, !run.group.shared_memory() && mpi_is_cuda_aware());
                  run.stage.fetch();
                  run.group.broadcast(data, tensor.nbytes(), root, run.timeout);
                  run.stage.give_back();
                });
}

MpiBackend::WorkPtr MpiBackend::allgather_all(c10d::OpType type, std::vector<std::pair<at::Tensor, at::Tensor>> pairs,
                                              const c10d::AllgatherOptions& options) {
  Tensors outputs, inputs;
  for (const auto& [output, input] : pairs) {
    TORCH_CHECK(output.numel() == input.numel() * size_ && output.scalar_type() == input.scalar_type(),
                "all_gather of ", input.sizes(), " ", input.scalar_type(), " over ", size_, " ranks does not fit in ",
                output.sizes(), " ", output.scalar_type());
    outputs.push_back(output);
    inputs.push_back(input);
  }
  const int size = size_;
  return submit({type, "all_gather", outputs, inputs, options.timeout, !options.asyncOp}, [=](Running& run) {
    std::vector<std::pair<void*, void*>> places;
    for (const auto& [output, input] : pairs) places.emplace_back(run.write(output), run.read(input));
    run.stage.fetch();
    for (size_t i = 0; i < pairs.size(); ++i) {
      const size_t bytes = pairs[i].second.nbytes();
      auto parts = cut(places[i].first, size, bytes);
      run.group.allgather(places[i].second, parts.data(), bytes, run.timeout);
    }
    run.stage.give_back();
  });
}

MpiBackend::WorkPtr MpiBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::AllgatherOptions& options) {
  return allgather_all(c10d::OpType::_ALLGATHER_BASE, {{output, input}}, options);
}

MpiBackend::WorkPtr MpiBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                const c10d::AllgatherOptions& options) {
  TORCH_CHECK(outputs.size() == inputs.size(), "all_gather of ", inputs.size(), " tensors into ", outputs.size());
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
  for (size_t i = 0; i < outputs.size(); ++i) pairs.emplace_back(outputs[i], inputs[i]);
  return allgather_all(c10d::OpType::COALESCED, std::move(pairs), options);
}

MpiBackend::WorkPtr MpiBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) {
  check_one(inputs, "all_gather");
  auto input = inputs[0];
  check_list(outputs, size_, input, "all_gather");
  auto list = outputs[0];
  return submit({c10d::OpType::ALLGATHER, "all_gather", list, inputs, options.timeout, !options.asyncOp},
                [=](Running& run) {
                  void* from = run.read(input);
                  std::vector<void*> to;
                  for (const auto& tensor : list) to.push_back(run.write(tensor));
                  run.stage.fetch();
                  run.group.allgather(from, to.data(), input.nbytes(), run.timeout);
                  run.stage.give_back();
                });
}

MpiBackend::WorkPtr MpiBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& options) {
  TORCH_CHECK(outputs.size() == static_cast<size_t>(size_), "all_gather needs a list of outputs for each of ", size_,
              " ranks");
  Tensors all;
  for (const auto& list : outputs) {
    TORCH_CHECK(list.size() == inputs.size(), "all_gather of ", inputs.size(), " tensors into ", list.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      TORCH_CHECK(list[i].nbytes() == inputs[i].nbytes(), "all_gather: an output has not the size of its input");
      all.push_back(list[i]);
    }
  }
  return submit({c10d::OpType::ALLGATHER_COALESCED, "all_gather", all, inputs, options.timeout, !options.asyncOp},
                [outputs = outputs, inputs = inputs](Running& run) {
                  std::vector<void*> from;
                  std::vector<std::vector<void*>> to(inputs.size());
                  for (size_t i = 0; i < inputs.size(); ++i) {
                    from.push_back(run.read(inputs[i]));
                    for (const auto& list : outputs) to[i].push_back(run.write(list[i]));
                  }
                  run.stage.fetch();
                  for (size_t i = 0; i < inputs.size(); ++i) {
                    run.group.allgather(from[i], to[i].data(), inputs[i].nbytes(), run.timeout);
                  }
                  run.stage.give_back();
                });
}

MpiBackend::WorkPtr MpiBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                       const c10d::GatherOptions& options) {
  check_one(inputs, "gather");
  auto input = inputs[0];
  const int root = static_cast<int>(options.rootRank);
  Tensors list;
  if (rank_ == root) {
    check_list(outputs, size_, input, "gather");
    list = outputs[0];
  }
  return submit({c10d::OpType::GATHER, "gather", list, inputs, options.timeout}, [=](Running& run) {
    void* from = run.read(input);
    std::vector<void*> to;
    for (const auto& tensor : list) to.push_back(run.write(tensor));
    run.stage.fetch();
    run.group.gather(from, to.data(), input.nbytes(), root, run.timeout);
    run.stage.give_back();
  });
}

MpiBackend::WorkPtr MpiBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                        const c10d::ScatterOptions& options) {
  check_one(outputs, "scatter");
  auto output = outputs[0];
  const int root = static_cast<int>(options.rootRank);
  Tensors list;
  if (rank_ == root) {
    check_list(inputs, size_, output, "scatter");
    list = inputs[0];
  }
  return submit({c10d::OpType::SCATTER, "scatter", outputs, list, options.timeout}, [=](Running& run) {
    void* to = run.write(output);
    std::vector<const void*> from;
    for (const auto& tensor : list) from.push_back(run.read(tensor));
    run.stage.fetch();
    run.group.scatter(from.data(), to, output.nbytes(), root, run.timeout);
    run.stage.give_back();
  });
}

MpiBackend::WorkPtr MpiBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                              std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                                              const c10d::AllToAllOptions& options) {
  TORCH_CHECK(output.scalar_type() == input.scalar_type(), "all_to_all between ", input.scalar_type(), " and ",
              output.scalar_type());
  auto sizes = [this](const at::Tensor& tensor, const std::vector<int64_t>& splits, const char* side) {
    const int64_t rows = tensor.dim() > 0 ? tensor.size(0) : 1;
    const size_t row = rows > 0 ? tensor.nbytes() / rows : 0;
    std::vector<size_t> bytes(size_);
    if (splits.empty()) {
      TORCH_CHECK(rows % size_ == 0, "all_to_all: the ", rows, " rows of the ", side, " cannot be dealt to ", size_,
                  " ranks; give the sizes");
      std::fill(bytes.begin(), bytes.end(), row * (rows / size_));
      return bytes;
    }
    TORCH_CHECK(splits.size() == static_cast<size_t>(size_) &&
                    std::accumulate(splits.begin(), splits.end(), int64_t{0}) == rows,
                "all_to_all: the ", side, " sizes ", splits, " do not add up to its ", rows, " rows over ", size_,
                " ranks");
    for (int i = 0; i < size_; ++i) bytes[i] = row * splits[i];
    return bytes;
  };
  auto out = sizes(output, output_splits, "output"), in = sizes(input, input_splits, "input");
  return submit({c10d::OpType::ALLTOALL_BASE, "all_to_all", {output}, {input}, options.timeout},
                [output = output, input = input, out, in](Running& run) {
                  auto to = static_cast<uint8_t*>(run.write(output)), from = static_cast<uint8_t*>(run.read(input));
                  run.stage.fetch();
                  std::vector<Channel::Piece> sends, receives;
                  for (size_t i = 0; i < out.size(); ++i) {
                    sends.push_back({static_cast<int>(i), from, in[i]});
                    receives.push_back({static_cast<int>(i), to, out[i]});
                    from += in[i];
                    to += out[i];
                  }
                  run.group.alltoall(sends, receives, run.timeout);
                  run.stage.give_back();
                });
}

MpiBackend::WorkPtr MpiBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  TORCH_CHECK(outputs.size() == static_cast<size_t>(size_) && inputs.size() == outputs.size(),
              "all_to_all needs lists of ", size_, " tensors, one for each rank");
  return submit({c10d::OpType::ALLTOALL, "all_to_all", outputs, inputs, options.timeout},
                [outputs = outputs, inputs = inputs](Running& run) {
                  std::vector<Channel::Piece> sends, receives;
                  for (size_t i = 0; i < outputs.size(); ++i) {
                    sends.push_back({static_cast<int>(i), run.read(inputs[i]), inputs[i].nbytes()});
                    receives.push_back({static_cast<int>(i), run.write(outputs[i]), outputs[i].nbytes()});
                  }
                  run.stage.fetch();
                  run.group.alltoall(sends, receives, run.timeout);
                  run.stage.give_back();
                });
}

MpiBackend::WorkPtr MpiBackend::barrier(const c10d::BarrierOptions& options) {
  return submit({c10d::OpType::BARRIER, "barrier", {}, {}, options.timeout, !options.asyncOp},
                [](Running& run) { run.group.barrier(run.timeout); });
}

void MpiBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool) { barrier(options)->wait(); }

}  // namespace dtrain
