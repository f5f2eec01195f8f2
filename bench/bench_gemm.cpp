// SPDX-License-Identifier: MIT
// Dense and grouped GEMM: checks samples of the product against f64, then times it, and shows the
// rate as a share of what the device's FMA units give in a register-only loop of the same run.
// Options: Google Benchmark's.

#include "support/op_bench.hpp"

#include <bellows/engine/gemm.hpp>
#include <bellows/kernels/kernels.hpp>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <memory>

namespace bellows::bench {
namespace {

enum class Form { NT, NN, TN };

struct Shape {
    std::uint64_t m, n, k;
};

/// GFLOPS of FMAs on registers, the best of a few runs after 50 ms of warm-up.
double measure_peak(Device& device) {
    const std::uint32_t groups = device.info().is_cpu ? 64 : 8192;
    const std::uint32_t steps = device.info().is_cpu ? 20000 : 4096;
    kernels::PeakFma kernel;
    kernel.constants.local_size = device.info().is_cpu ? 8 : 256;
    const std::uint64_t invocations = std::uint64_t{groups} * kernel.constants.local_size;
    Buffer sums(device, {.name = "sums", .bytes = invocations * 4});
    kernel.sums = sums.view();
    kernel.steps = steps;
    kernel.factor = 0.5f;
    kernel.addend = 1.0f; // every chain tends to 2
    Recording recording(device, QueueRole::Compute, "peak");
    recording.dispatch(kernel, {groups});
    double best = 1e30, total = 0;
    for (int run = 0; run < 100 && (run < 4 || total < 0.2); ++run) {
        const auto begin = std::chrono::steady_clock::now();
        device.submit(recording).wait();
        const double seconds =
            std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        total += seconds;
        best = std::min(best, seconds);
    }
    std::vector<float> values(invocations);
    device.download(sums.view(), std::span<float>(values));
    for (const float value : values)
        if (value != 32.0f)
            throw Error(ErrorCode::Internal,
                        "the FMA loop gives " + std::to_string(value) + ", not 16 chains of 2");
    return 32.0 * steps * static_cast<double>(invocations) / best * 1e-9;
}

TensorView row_major(OpData& data, DType dtype, std::uint64_t rows, std::uint64_t columns) {
    return data.random(dtype, {rows, columns});
}

Workload gemm(OpData& data, Form form, const Shape& s, DType dtype) {
    const TensorView a =
        form == Form::TN ? row_major(data, dtype, s.k, s.m) : row_major(data, dtype, s.m, s.k);
    const TensorView b =
        form == Form::NT ? row_major(data, dtype, s.n, s.k) : row_major(data, dtype, s.k, s.n);
    const TensorView d = data.empty(dtype, {s.m, s.n});
    Workload work;
    work.record = [=](Recording& recording) {
        switch (form) {
        case Form::NT:
            return ops::gemm_nt(recording, a, b, d);
        case Form::NN:
            return ops::gemm_nn(recording, a, b, d);
        case Form::TN:
            return ops::gemm_tn(recording, a, b, d);
        }
    };
    work.verify = [=, &data]() -> std::string {
        const auto va = data.read(a), vb = data.read(b), vd = data.read(d);
        for (const std::uint64_t i : {std::uint64_t{0}, s.m / 2, s.m - 1})
            for (const std::uint64_t j : {std::uint64_t{0}, s.n / 3, s.n - 1}) {
                double sum = 0;
                for (std::uint64_t l = 0; l < s.k; ++l)
                    sum += va[form == Form::TN ? l * s.m + i : i * s.k + l] *
                           vb[form == Form::NT ? j * s.k + l : l * s.n + j];
                const double tolerance = dtype == DType::BF16 ? 8e-3 : 1e-4;
                const std::string wrong =
                    compare("d", i * s.n + j, vd[i * s.n + j], sum, tolerance, 1);
                if (!wrong.empty())
                    return wrong;
            }
        return "";
    };
    work.flops =
        2.0 * static_cast<double>(s.m) * static_cast<double>(s.n) * static_cast<double>(s.k);
    work.bytes = static_cast<double>(a.num_bytes() + b.num_bytes() + d.num_bytes());
    return work;
}

void register_all(Device& device, double peak) {
    const std::vector<Shape> shapes =
        device.info().is_cpu
            ? std::vector<Shape>{{1024, 1024, 1024}, {512, 384, 128}, {256, 128, 512}}
            : std::vector<Shape>{{1024, 1024, 1024}, {4096, 4096, 7168}, {8192, 8192, 8192}};
    static constexpr const char* kForms[] = {"nt", "nn", "tn"};
    for (const Shape& shape : shapes)
        for (const Form form : {Form::NT, Form::NN, Form::TN})
            for (const DType dtype : {DType::F32, DType::BF16}) {
                const std::string name = std::string("gemm_") + kForms[static_cast<int>(form)] +
                                         "/" + std::to_string(shape.m) + "x" +
                                         std::to_string(shape.n) + "x" + std::to_string(shape.k) +
                                         "/" + to_string(dtype);
                benchmark::RegisterBenchmark(
                    name.c_str(),
                    [&device, peak, shape, form, dtype](benchmark::State& state) {
                        OpData data(device);
                        run_workload(state, data, gemm(data, form, shape, dtype));
                        state.counters["of_fma_peak"] =
                            static_cast<double>(state.counters["GFLOPS"]) / peak;
                    })
                    ->UseManualTime()
                    ->Unit(benchmark::kMicrosecond);
            }
}

} // namespace
} // namespace bellows::bench

int main(int argc, char** argv) {
    using namespace bellows;
    benchmark::Initialize(&argc, argv);
    if (benchmark::ReportUnrecognizedArguments(argc, argv))
        return 2;
    try {
        const std::unique_ptr<Device> device = Device::create(DeviceOptions::from_environment({}));
        const double peak = bench::measure_peak(*device);
        benchmark::AddCustomContext("device", device->info().name + ", " + device->info().driver);
        benchmark::AddCustomContext("fma_peak_gflops", std::to_string(peak));
        bench::register_all(*device, peak);
        benchmark::RunSpecifiedBenchmarks();
        benchmark::Shutdown();
    } catch (const Error& error) {
        std::cerr << error.what() << "\n";
        return error.code() == ErrorCode::Unsupported ? 3 : 1;
    }
    return 0;
}
