// SPDX-License-Identifier: MIT
// A whole layer of experts forward, on one device: checks its results against f64, then times the
// layer and each of its parts. `--help` lists the options.

#include "moe_layer/layer.hpp"
#include "support/peaks.hpp"
#include "support/program.hpp"

#include <bellows/base/error.hpp>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <tuple>

namespace bellows::bench {
namespace {

constexpr const char* kHelp =
    R"(bench_moe_layer: the forward of a layer of experts on one device, from the ids and weights of a router to
the sum of each token's experts in bf16. Rows are of the whole layer and of its parts by themselves:
  whole     all parts in one recording
  place     each expert's rows from the ids, and the work list of the products
  quantise  fp8: tokens in 1 x 128 blocks; the product reads them where they stand. bf16: gather, into rows
  gate_up   rows by the weights [experts, 2 * ffn, hidden]
  swiglu    and, fp8, its quantisation
  down      rows by the weights [experts, hidden, ffn]
  combine   a token's rows times its weights, added up in f32 in the order of k
Weights are bf16, or E4M3 in 128 x 128 blocks, quantised and packed before the clock starts. GFLOPS counts
the products of the tokens' rows alone: 2 * 3 * tokens * top-k * hidden * ffn. "of peak" is the share of a
loop of the same run on the matrix units ("matrix"), the f32 units ("fma"), or memory ("copy").

  --tokens N        (default 8192; less on CPUs, as all sizes)
  --hidden N        (default 7168; a multiple of 8)
  --experts N       (default 48)
  --ffn N           (default 3072; a multiple of 8)
  --top-k N         different experts for each token (default 6)
  --skew S          expert e is as likely as 1 / (e + 1)^S (default 0: all alike)
  --precision P,... fp8, bf16 (default both)
  --measure         first times the ways of computing the products, as a training run does, and takes the
                    fastest; without, the device's usual ones
  --kernels         also shows each kernel's time in the whole layer, by timestamps, which cost a little
                    time in all rows
)";

[[noreturn]] void refuse(const std::string& what) {
    throw Error(ErrorCode::InvalidArgument, what + "; see bench_moe_layer --help");
}

class BenchMoeLayer : public Program {
    std::string help() const override { return kHelp; }

    void take(Arguments& arguments) override {
        const auto size = [&](const char* name) {
            return arguments.number(name, 0, 1, std::uint64_t{1} << 24);
        };
        given_ = {size("--tokens"), size("--hidden"), size("--experts"), size("--ffn"),
                  size("--top-k")};
        for (const std::string& word :
             Arguments::split(arguments.value("--precision").value_or("fp8,bf16"))) {
            if (word != "fp8" && word != "bf16")
                refuse("--precision: \"" + word + "\" is neither fp8 nor bf16");
            precisions_.push_back(word);
        }
        if (const auto skew = arguments.value("--skew")) {
            char* end = nullptr;
            skew_ = std::strtod(skew->c_str(), &end);
            if (end == skew->c_str() || *end != 0 || !(skew_ >= 0 && skew_ <= 10))
                refuse("--skew: \"" + *skew + "\" is no number from 0 to 10");
        }
        measure_ = arguments.flag("--measure");
        kernels_ = arguments.flag("--kernels");
    }

    void configure(DeviceOptions& options) const override { options.trace = kernels_; }

    void add(Device& device) override {
        const MoeLayerShape shape = shape_on(device);
        copy_ = measure(device, copy_peak);
        fma_ = measure(device, fma_peak);
        matrix_ = measure(device, matrix_peak);
        add_context("class of bf16 products", gemm_class(device).name);
        for (const std::string& precision : precisions_)
            add_layer(device, {shape, precision == "fp8", skew_}, precision);
    }

    void finish() override {
        for (const std::string& line : kernel_lines_)
            std::printf("%s\n", line.c_str());
        layer_.reset();
    }

    MoeLayerShape shape_on(const Device& device) const {
        const bool cpu = device.info().is_cpu;
        MoeLayerShape shape =
            cpu ? MoeLayerShape{256, 512, 8, 256, 2} : MoeLayerShape{8192, 7168, 48, 3072, 6};
        for (auto size : {&MoeLayerShape::tokens, &MoeLayerShape::hidden, &MoeLayerShape::experts,
                          &MoeLayerShape::ffn, &MoeLayerShape::top_k})
            if (given_.*size > 0)
                shape.*size = given_.*size;
        if (shape.hidden % 8 != 0 || shape.ffn % 8 != 0)
            refuse("--hidden and --ffn must be multiples of 8");
        if (shape.top_k > shape.experts)
            refuse("--top-k must be at most --experts, which is " + std::to_string(shape.experts));
        return shape;
    }

    void add_layer(Device& device, const MoeLayerCase& c, const std::string& precision) {
        const std::string name = "moe_layer/" + name_of(c.shape) + "/" + precision;
        add_benchmark(name + "/whole", [=, this, &device](benchmark::State& state) {
            MoeLayer& layer = layer_of(device, c);
            time(state, layer, layer.workload());
            label(state, layer);
            if (kernels_)
                time_kernels(device, layer, name);
        });
        for (const char* part :
             {"place", c.fp8 ? "quantise" : "gather", "gate_up", "swiglu", "down", "combine"})
            add_benchmark(name + "/" + part, [=, this, &device](benchmark::State& state) {
                MoeLayer& layer = layer_of(device, c);
                const auto& parts = layer.parts();
                const auto found = std::ranges::find(parts, part, &MoeLayer::Part::name);
                if (found == parts.end())
                    throw Error(ErrorCode::Internal, std::string("there is no part ") + part);
                time(state, layer, layer.workload(*found));
            });
    }

    /// One at a time stands in memory.
    MoeLayer& layer_of(Device& device, const MoeLayerCase& c) {
        if (!layer_ || layer_fp8_ != c.fp8) {
            layer_.reset();
            layer_ = std::make_unique<MoeLayer>(device, c, choice(device, c.fp8));
            layer_fp8_ = c.fp8;
        }
        return *layer_;
    }

    fp8::Choice choice(Device& device, bool fp8) const {
        if (!measure_)
            return fp8 ? fp8::usual_choice(device) : fp8::usual_choice_of_bf16(device);
        fp8::MeasureOptions options;
        for (const fp8::ProductKind& kind : fp8::product_kinds())
            if (kind.form == GemmForm::NT && kind.grouping == fp8::Grouping::Grouped &&
                kind.pair == (fp8 ? fp8::Pair::Fp8 : fp8::Pair::Bf16))
                options.kinds.push_back(kind);
        const auto measured = fp8::measure(device, options);
        return fp8 ? fp8::choose(measured, fp8::Bits::Usual)
                   : fp8::choose_of_bf16(measured, fp8::Bits::Usual);
    }

    void time(benchmark::State& state, MoeLayer& layer, const Workload& workload) const {
        const Ceiling& arithmetic = matrix_.rate > 0 ? matrix_ : fma_;
        const bool by_memory =
            workload.bytes / copy_.rate > workload.flops / std::max(arithmetic.rate, 1e-9);
        run_workload(state, layer.data(), workload, by_memory ? copy_ : arithmetic);
    }

    void label(benchmark::State& state, MoeLayer& layer) const {
        const double mib =
            static_cast<double>(layer.data().device().memory_report().bytes) / (1 << 20);
        state.counters["MiB"] = mib;
        char text[96];
        std::snprintf(text, sizeof text, "%.3g TFLOPS, %.0f MiB, ",
                      1e-3 * static_cast<double>(state.counters["GFLOPS"]), mib);
        state.SetLabel(text + layer.variants());
    }

    /// The medians of some runs.
    void time_kernels(Device& device, MoeLayer& layer, const std::string& name) {
        Recording recording(device, QueueRole::Compute, "layer");
        layer.record(recording);
        using Kernel = std::pair<std::string, std::string>; // part, name
        std::vector<Kernel> order;
        std::map<Kernel, std::vector<double>> times;
        std::vector<double> spans;
        for (int run = 0; run < 9; ++run) {
            device.take_trace();
            device.submit(recording).wait();
            device.wait_idle();
            std::vector<TraceEvent> events = device.take_trace();
            std::erase_if(events, [](const TraceEvent& event) { return event.is_job(); });
            if (events.empty())
                throw Error(ErrorCode::Unsupported, "--kernels: the device has no timestamps");
            std::ranges::sort(events, {}, &TraceEvent::begin_ns);
            std::map<Kernel, double> sums;
            for (const TraceEvent& event : events) {
                const Kernel kernel{event.category, event.name};
                if (std::ranges::find(order, kernel) == order.end())
                    order.push_back(kernel);
                sums[kernel] += 1e-3 * static_cast<double>(event.end_ns - event.begin_ns);
            }
            for (const auto& [kernel, sum] : sums)
                times[kernel].push_back(sum);
            spans.push_back(1e-3 * static_cast<double>(
                                       std::ranges::max(events, {}, &TraceEvent::end_ns).end_ns -
                                       events.front().begin_ns));
        }
        const double span = median_of(spans);
        add_line(name + ", by kernel", span, 1);
        for (const Kernel& kernel : order) {
            const double time = median_of(times[kernel]);
            add_line("  " + kernel.first + " " + kernel.second, time, time / span);
        }
    }

    void add_line(const std::string& name, double microseconds, double share) {
        char text[64];
        std::snprintf(text, sizeof text, " %12.2f us %7.1f %%", microseconds, 100 * share);
        kernel_lines_.push_back(name + std::string(name.size() < 48 ? 48 - name.size() : 0, ' ') +
                                text);
    }

    MoeLayerShape given_; ///< 0: not given
    std::vector<std::string> precisions_;
    double skew_ = 0;
    bool measure_ = false, kernels_ = false, layer_fp8_ = false;
    std::unique_ptr<MoeLayer> layer_;
    std::vector<std::string> kernel_lines_;
    Ceiling copy_, fma_, matrix_;
};

} // namespace
} // namespace bellows::bench

int main(int argc, char** argv) {
    bellows::bench::BenchMoeLayer program;
    return program.run(argc, argv);
}
