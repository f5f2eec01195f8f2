// SPDX-License-Identifier: MIT
#include "app/kernel_choice.hpp"

#include "app/product_times.hpp"

#include <bellows/engine/error.hpp>
#include <bellows/engine/gemm_plan.hpp>

#include <algorithm>
#include <span>

namespace bellows {

namespace {

std::string text_of(const HostCollectives::Bytes& bytes) {
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::string of_rank_0(HostCollectives& everyone, const std::string& text) {
    const auto mine = std::as_bytes(std::span(text));
    HostCollectives::Bytes bytes(mine.begin(), mine.end());
    everyone.broadcast(0, bytes);
    return text_of(bytes);
}

std::string wanted_products(Device& device, const KernelChoice& wanted) {
    const auto fp8 = wanted.chosen.find("fp8");
    return fp8 != wanted.chosen.end()
               ? fp8->second
               : describe(device, fp8::choose(fp8::measure(device, {.timed = fp8::Timed::None}),
                                              fp8::Bits::Usual));
}

AgreedKernels agree_on_products(Device& device, HostCollectives& everyone, bool leads,
                                const KernelChoice& wanted) {
    AgreedKernels agreed;
    const std::string text = of_rank_0(everyone, leads ? wanted_products(device, wanted) : "");
    fp8::Choice choice(fp8::Variant::Decoded);
    std::string lacks;
    try {
        choice = fp8::parse_choice(device, text);
    } catch (const Error& error) {
        lacks = error.message();
    }
    const auto all = everyone.all_gather(std::as_bytes(std::span(lacks)));
    const auto lacking =
        std::find_if(all.begin(), all.end(), [](const auto& reason) { return !reason.empty(); });
    if (lacking != all.end()) {
        agreed.why_decoded = text_of(*lacking);
        if (wanted.binding)
            throw Error(
                ErrorCode::Unsupported,
                agreed.why_decoded +
                    "; this run's products must be, so take devices like those that it had, or set "
                    "BELLOWS_FP8_VARIANTS=decoded, which gives other bits",
                static_cast<int>(lacking - all.begin()));
        choice = fp8::Choice(fp8::Variant::Decoded);
    }
    take_kept_tiles(device, choice);
    agreed.products = std::move(choice);
    return agreed;
}

} // namespace

AgreedKernels agree_on_kernels(Device& device, HostCollectives& everyone, bool leads,
                               const TrainConfig& config, const KernelChoice& wanted) {
    if (activation_type(config) != DType::BF16)
        return {};
    const auto gemm = wanted.chosen.find("gemm");
    const bool open = gemm == wanted.chosen.end() || gemm->second.empty();
    use_gemm_class(device, of_rank_0(everyone, open ? gemm_class(device).name : gemm->second));
    return linear_precision(config) == LinearPrecision::Fp8
               ? agree_on_products(device, everyone, leads, wanted)
               : AgreedKernels{};
}

} // namespace bellows
