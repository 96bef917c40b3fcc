// An operator for --dali-plugin: fn.solarize inverts the values of uint8 images from a threshold on, on the CPU.
//
// A stateless operator needs nothing for DALI's checkpoints. One that draws at random must save its generator, or a
// resume would not be exact: operators derived from dali::Operator alone are refused.

#include <cstdint>
#include <vector>

#include "dali/pipeline/operator/checkpointing/stateless_operator.h"
#include "dali/pipeline/operator/operator.h"

namespace example {

using Base = dali::StatelessOperator<dali::CPUBackend>;

class Solarize : public Base {
 public:
  explicit Solarize(const dali::OpSpec &spec) : Base(spec) {}

 protected:
  bool SetupImpl(std::vector<dali::OutputDesc> &outputs, const dali::Workspace &ws) override {
    const auto &input = ws.Input<dali::CPUBackend>(0);
    DALI_ENFORCE(input.type() == DALI_UINT8, "solarize takes uint8 images");
    outputs = {{input.shape(), input.type()}};
    return true;
  }

  void RunImpl(dali::Workspace &ws) override {
    const auto &input = ws.Input<dali::CPUBackend>(0);
    auto &output = ws.Output<dali::CPUBackend>(0);
    output.SetLayout(input.GetLayout());
    auto &threads = ws.GetThreadPool();
    for (int sample = 0; sample < input.num_samples(); sample++) {
      const int threshold = spec_.GetArgument<int>("threshold", &ws, sample);
      const int64_t size = input.shape().tensor_size(sample);
      const auto *in = input.tensor<uint8_t>(sample);
      auto *out = output.mutable_tensor<uint8_t>(sample);
      auto work = [=](int) {
        for (int64_t i = 0; i < size; i++) out[i] = in[i] < threshold ? in[i] : 255 - in[i];
      };
      threads.AddWork(work, size);
    }
    threads.RunAll();
  }
};

}  // namespace example

DALI_REGISTER_OPERATOR(Solarize, example::Solarize, dali::CPU);

DALI_SCHEMA(Solarize)
    .DocStr("Inverts the values of uint8 images from a threshold on.")
    .NumInput(1)
    .NumOutput(1)
    .AddOptionalArg("threshold", "Least value that is inverted, 0 to 256; it may differ by image.", 128, true);
