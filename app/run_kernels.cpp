// SPDX-License-Identifier: MIT
#include "app/run_kernels.hpp"

#include "app/product_times.hpp"
#include "app/run_checkpoint.hpp"

#include <bellows/engine/error.hpp>
#include <bellows/engine/gemm_plan.hpp>

#include <cstdlib>
#include <string>
#include <utility>

namespace bellows {

namespace {

/// "" where the environment says nothing.
std::string wanted_variants() {
    const char* wanted = std::getenv(kFp8VariantsVariable);
    return wanted == nullptr ? "" : wanted;
}

/// The device is opened again, so that the run's own report of memory and trace begin with the run.
std::string
measured_choice(const Device& device, const std::string& gemm_class, fp8::Bits bits,
                std::function<void(std::uint64_t done, std::uint64_t total)> on_progress) {
    DeviceOptions options = device.options();
    options.trace = false;
    options.on_pipeline_compiled = {};
    if (!gemm_class.empty())
        options.gemm_class = gemm_class;
    const auto own = Device::create(options);
    if (const auto kept = kept_product_times(*own))
        return describe(*own, fp8::choose(kept->products, bits));
    const std::vector<fp8::Measurement> products =
        device.info().is_cpu ? fp8::measure(*own, {.timed = fp8::Timed::None})
                             : measure_product_times(*own, std::move(on_progress)).products;
    return describe(*own, fp8::choose(products, bits));
}

} // namespace

KernelChoice
choose_kernels(const Device& device, const RunConfig& config,
               const std::optional<Checkpoint>& before, bool leads,
               std::function<void(std::uint64_t done, std::uint64_t total)> on_progress) {
    KernelChoice kernels;
    if (before)
        kernels = kept_kernels(*before, device.options());
    if (linear_precision(config.train) != LinearPrecision::Fp8)
        return kernels;
    const std::string wanted = wanted_variants();
    const bool measured = wanted == "measured", kept = kernels.chosen.contains("fp8");
    if (!wanted.empty() && wanted != "usual" && !measured) {
        kernels.chosen["fp8"] = wanted;
        kernels.binding = true;
    } else if (measured || !kept) {
        kernels.binding = false;
        if (leads)
            kernels.chosen["fp8"] = measured_choice(device, kernels.chosen["gemm"],
                                                    measured ? fp8::Bits::Any : fp8::Bits::Usual,
                                                    std::move(on_progress));
    }
    return kernels;
}

fp8::Choice products_of(const Checkpoint& checkpoint, Device& device) {
    const auto& kernels = checkpoint.state().kernels;
    const auto fp8 = kernels.find("fp8");
    std::string text = fp8 == kernels.end() ? "decoded" : fp8->second;
    if (const std::string wanted = wanted_variants();
        !wanted.empty() && wanted != "usual" && wanted != "measured")
        text = wanted;
    fp8::Choice choice(fp8::Variant::Decoded);
    try {
        choice = fp8::parse_choice(device, text);
    } catch (const Error& error) {
        if (error.code() != ErrorCode::Unsupported)
            throw;
    }
    take_kept_tiles(device, choice);
    return choice;
}

} // namespace bellows
