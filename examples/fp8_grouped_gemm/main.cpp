// SPDX-License-Identifier: MIT
// Grouped FP8 products: the rows of each expert times the weights of that expert. Activations are
// quantised to E4M3 with a scale for 1 x 128 elements, weights with one for 128 x 128, both on the
// device. The result is compared with an f64 product of the same codes and scales on the host.
//
//   ./fp8_grouped_gemm                       on the best device
//   BELLOWS_DEVICE=cpu ./fp8_grouped_gemm    on another one: gpu, cpu, an index or a UUID

#include <bellows/base/error.hpp>
#include <bellows/engine/device.hpp>
#include <bellows/fp8/gemm.hpp>
#include <bellows/fp8/quantize.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <random>
#include <vector>

namespace {

namespace fp8 = bellows::fp8;
using bellows::DType;

constexpr std::uint64_t kGroups = 4, kRows = 256, kN = 256, kK = 512;
/// Group g has the rows kOffsets[g] .. kOffsets[g + 1]. A group may be empty.
constexpr std::uint32_t kOffsets[kGroups + 1] = {0, 100, 100, 137, kRows};
constexpr fp8::Recipe kActivations{.blocks = fp8::Blocks::Rows128};
constexpr fp8::Recipe kWeights{.blocks = fp8::Blocks::Blocks128};

bellows::Buffer memory(bellows::Device& device, std::uint64_t bytes) {
    return {device, {.name = "fp8_grouped_gemm", .bytes = bytes}};
}

std::vector<float> random_values(std::uint64_t count, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> values(count);
    std::generate(values.begin(), values.end(), [&] { return normal(random); });
    return values;
}

/// code * scale, exact in f32. kK is a multiple of 16, so the codes have no padding between rows;
/// block_rows: rows that share a scale.
std::vector<float> dequantised(bellows::Device& device, const fp8::Quantized& q,
                               std::uint64_t block_rows) {
    std::vector<std::uint8_t> codes(q.codes.num_elements());
    std::vector<float> scales(q.scales.num_elements());
    device.download(q.codes.buffer.sub(0, codes.size()), codes);
    device.download(q.scales.buffer.sub(0, scales.size() * 4), scales);
    std::vector<float> values(codes.size());
    for (std::size_t i = 0; i < codes.size(); ++i)
        values[i] = fp8::decode(fp8::Format::E4M3, codes[i]) *
                    scales[i / kK / block_rows * (kK / 128) + i % kK / 128];
    return values;
}

/// d[row] = a[row] * transpose(b[group of the row]) in f64.
std::vector<double> product(const std::vector<float>& a, const std::vector<float>& b) {
    std::vector<double> d(kRows * kN);
    for (std::uint64_t g = 0; g < kGroups; ++g)
        for (std::uint64_t row = kOffsets[g]; row < kOffsets[g + 1]; ++row)
            for (std::uint64_t n = 0; n < kN; ++n)
                d[row * kN + n] =
                    std::inner_product(&a[row * kK], &a[row * kK] + kK, &b[(g * kN + n) * kK], 0.0);
    return d;
}

/// Largest difference as a share of the largest expected value; a NaN counts as infinite.
double deviation(const std::vector<float>& actual, const std::vector<double>& expected) {
    double worst = 0, largest = 0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
        const double difference = std::abs(actual[i] - expected[i]);
        worst = std::isnan(difference) ? HUGE_VAL : std::max(worst, difference);
        largest = std::max(largest, std::abs(expected[i]));
    }
    return worst / largest;
}

int run() {
    const auto device = bellows::Device::create(bellows::DeviceOptions::from_environment({}));
    const auto x = random_values(kRows * kK, 1), w = random_values(kGroups * kN * kK, 2);
    const auto x_memory = memory(*device, x.size() * 4), w_memory = memory(*device, w.size() * 4);
    const auto offsets_memory = memory(*device, sizeof(kOffsets));
    device->upload(x_memory.view(), x);
    device->upload(w_memory.view(), w);
    device->upload(offsets_memory.view(), kOffsets);

    // Codes and scales stand behind one another in one buffer for each operand.
    const auto a_memory = memory(*device, fp8::quantized_bytes(kActivations, {kRows, kK}));
    const auto b_memory = memory(*device, fp8::quantized_bytes(kWeights, {kGroups, kN, kK}));
    const auto d_memory = memory(*device, kRows * kN * 4);
    const fp8::Quantized a = fp8::make_quantized(a_memory.view(), kActivations, {kRows, kK});
    const fp8::Quantized b = fp8::make_quantized(b_memory.view(), kWeights, {kGroups, kN, kK});
    const bellows::TensorView d = d_memory.tensor(DType::F32, {kRows, kN});
    const auto layout =
        fp8::GroupLayout::prefix_sums(offsets_memory.tensor(DType::U32, {kGroups + 1}), kRows);
    const auto list = memory(*device, fp8::grouped_rows_bytes(*device, layout));
    const auto workspace = memory(*device, fp8::gemm_workspace_bytes(*device, a, b));

    // Once: quantisation and the work list that all products over these rows share.
    bellows::Recording prepare(*device, bellows::QueueRole::Compute, "prepare");
    fp8::quantize(prepare, x_memory.tensor(DType::F32, {kRows, kK}), a);
    fp8::quantize(prepare, w_memory.tensor(DType::F32, {kGroups, kN, kK}), b);
    const fp8::GroupedRows rows = fp8::make_grouped_rows(prepare, layout, {kN}, list.view());
    device->submit(prepare);
    // The product is recorded once and submitted as often as it is wanted. That it reads what
    // `prepare` writes, Bellows sees from the operands: there are no barriers to place.
    bellows::Recording multiply(*device, bellows::QueueRole::Compute, "grouped product");
    fp8::m_grouped_gemm_nt_contiguous(multiply, a, b, d, rows, false, workspace.view());
    device->submit(multiply).wait();

    std::vector<float> result(kRows * kN);
    device->download(d.buffer, result);
    const auto expected = product(dequantised(*device, a, 1), dequantised(*device, b, 128));
    const double error = deviation(result, expected);
    const double of_fp8 = deviation(result, product(x, w));

    constexpr int kRepetitions = 20;
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kRepetitions; ++i)
        device->submit(multiply).wait();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    std::printf("%s: %.3f ms for each product, %.3f TFLOPS; largest deviation %.1e, from the "
                "product before quantisation %.1e\n",
                device->info().name.c_str(), seconds.count() * 1e3 / kRepetitions,
                2.0 * kRows * kN * kK * kRepetitions / seconds.count() * 1e-12, error, of_fp8);
    // Sums of 512 terms in f32 account for the first, E4M3's three bits of mantissa for the second.
    if (error <= 1e-5 && of_fp8 <= 0.1)
        return 0;
    std::fprintf(stderr, "fp8_grouped_gemm: wrong result\n");
    return 1;
}

} // namespace

int main() {
    try {
        return run();
    } catch (const bellows::Error& error) {
        std::fprintf(stderr, "fp8_grouped_gemm: %s\n", error.what());
        return 3;
    }
}
