// Checks of what torch hands to a collective, and views of it.
#pragma once

#include <ATen/ATen.h>

#include <vector>

namespace dtrain {

inline void check_one(const std::vector<at::Tensor>& tensors, const char* what) {
  TORCH_CHECK(tensors.size() == 1, what, " takes one tensor for each process, not ", tensors.size());
}

inline void check_list(const std::vector<std::vector<at::Tensor>>& lists, int size, const at::Tensor& like,
                       const char* what) {
  TORCH_CHECK(lists.size() == 1 && lists[0].size() == static_cast<size_t>(size), what, " needs a list of ", size,
              " tensors, one for each rank");
  for (const auto& tensor : lists[0]) {
    TORCH_CHECK(tensor.numel() == like.numel() && tensor.scalar_type() == like.scalar_type(), what,
                " needs tensors of one size and type, not ", tensor.sizes(), " ", tensor.scalar_type(), " and ",
                like.sizes(), " ", like.scalar_type());
  }
}

inline std::vector<void*> cut(void* base, int parts, size_t bytes) {
  std::vector<void*> pointers;
  for (int i = 0; i < parts; ++i) pointers.push_back(static_cast<uint8_t*>(base) + bytes * i);
  return pointers;
}

}  // namespace dtrain
