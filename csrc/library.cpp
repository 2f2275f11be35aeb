// The schemas of all operators, once for every device. The Python side of each is megadiff/ops/<op>.py.
#include "binding.h"

MEGADIFF_DEFINE(MEGADIFF_LIBRARY, m) {
  m.def("weighted_mse(Tensor output, Tensor target, Tensor weight, Tensor? mask) -> Tensor");
  m.def(
      "weighted_mse_backward(Tensor loss_grad, Tensor output, Tensor target, Tensor weight, Tensor? mask) -> Tensor");
}
