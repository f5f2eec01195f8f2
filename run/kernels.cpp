// SPDX-License-Identifier: MIT
#include <bellows/run/kernels.hpp>

#include <bellows/base/error.hpp>
#include <bellows/engine/gemm_plan.hpp>
#include <bellows/run/product_times.hpp>

#include <algorithm>
#include <cstdlib>
#include <span>
#include <utility>

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

std::string wanted_products(Device& device, const std::string& key, const KernelChoice& wanted) {
    const auto named = wanted.chosen.find(key);
    return named != wanted.chosen.end() ? named->second : usual_products(device, key);
}

AgreedKernels agree_on_products(Device& device, HostCollectives& everyone, bool leads,
                                const std::string& key, const KernelChoice& wanted) {
    AgreedKernels agreed;
    const std::string text = of_rank_0(everyone, leads ? wanted_products(device, key, wanted) : "");
    fp8::Choice choice(fp8::Variant::Decoded);
    std::string lacks;
    try {
        choice = parse_products(device, key, text);
    } catch (const Error& error) {
        lacks = error.message();
    }
    const auto all = everyone.all_gather(std::as_bytes(std::span(lacks)));
    const auto lacking =
        std::find_if(all.begin(), all.end(), [](const auto& reason) { return !reason.empty(); });
    if (lacking != all.end()) {
        agreed.why_decoded = text_of(*lacking);
        if (wanted.binding)
            throw Error(ErrorCode::Unsupported,
                        agreed.why_decoded +
                            "; this run's products must be, so take devices like those that it "
                            "had, or set " +
                            variants_variable(key) + "=decoded, which gives other bits",
                        static_cast<int>(lacking - all.begin()));
        choice = fp8::Choice(fp8::Variant::Decoded);
    }
    take_kept_tiles(device, choice);
    agreed.products = std::move(choice);
    return agreed;
}

/// "" where the environment says nothing.
std::string wanted_variants(const std::string& key) {
    const char* wanted = key.empty() ? nullptr : std::getenv(variants_variable(key));
    return wanted == nullptr ? "" : wanted;
}

/// Whether that is a choice itself.
bool is_named(const std::string& wanted) {
    return !wanted.empty() && wanted != "usual" && wanted != "measured";
}

/// The device is opened again, so that the run's own report of memory and trace begin with the run.
std::string
measured_choice(const Device& device, const std::string& key, const std::string& gemm_class,
                fp8::Bits bits,
                std::function<void(std::uint64_t done, std::uint64_t total)> on_progress) {
    DeviceOptions options = device.options();
    options.trace = false;
    options.on_pipeline_compiled = {};
    if (!gemm_class.empty())
        options.gemm_class = gemm_class;
    const auto own = Device::create(options);
    const auto choose = key == "bf16" ? fp8::choose_of_bf16 : fp8::choose;
    if (const auto kept = kept_product_times(*own))
        return describe(*own, choose(kept->products, bits));
    const std::vector<fp8::Measurement> products =
        device.info().is_cpu ? fp8::measure(*own, {.timed = fp8::Timed::None})
                             : measure_product_times(*own, std::move(on_progress)).products;
    return describe(*own, choose(products, bits));
}

} // namespace

const char* products_key(Precision precision) {
    return precision == Precision::FP8 ? "fp8" : precision == Precision::BF16 ? "bf16" : "";
}

const char* variants_variable(const std::string& key) {
    return key == "bf16" ? kBf16VariantsVariable : kFp8VariantsVariable;
}

std::string usual_products(Device& device, const std::string& key) {
    return describe(device,
                    key == "bf16" ? fp8::usual_choice_of_bf16(device) : fp8::usual_choice(device));
}

fp8::Choice parse_products(Device& device, const std::string& key, const std::string& text) {
    const fp8::Choice choice = fp8::parse_choice(device, text);
    if (key != "bf16" || choice.otherwise() == fp8::Variant::Decoded)
        return choice;
    fp8::Choice all =
        fp8::parse_choice(device, choice.otherwise() == fp8::Variant::Device
                                      ? usual_products(device, key)
                                      : describe(device, fp8::of_bf16(choice.otherwise())));
    for (const fp8::ProductKind& kind : fp8::product_kinds())
        if (choice.at(kind) != choice.otherwise())
            all.set(kind, choice.at(kind));
    return all;
}

AgreedKernels agree_on_kernels(Device& device, HostCollectives& everyone, bool leads,
                               Precision precision, const KernelChoice& wanted) {
    if (precision == Precision::F32)
        return {};
    const auto gemm = wanted.chosen.find("gemm");
    const bool open = gemm == wanted.chosen.end() || gemm->second.empty();
    use_gemm_class(device, of_rank_0(everyone, open ? gemm_class(device).name : gemm->second));
    return agree_on_products(device, everyone, leads, products_key(precision), wanted);
}

KernelChoice
choose_kernels(const Device& device, Precision precision, const KernelNames* kept, bool leads,
               std::function<void(std::uint64_t done, std::uint64_t total)> on_progress) {
    KernelChoice kernels;
    if (kept != nullptr)
        kernels = kept_kernels(*kept, device.options());
    const std::string key = products_key(precision), wanted = wanted_variants(key);
    if (key.empty())
        return kernels;
    const bool measured = wanted == "measured", known = kernels.chosen.contains(key);
    if (is_named(wanted)) {
        kernels.chosen[key] = wanted;
        kernels.binding = true;
    } else if (measured || !known) {
        kernels.binding = false;
        // No clock decides what is usual for bf16.
        if (leads && (measured || key != "bf16"))
            kernels.chosen[key] = measured_choice(device, key, kernels.chosen["gemm"],
                                                  measured ? fp8::Bits::Any : fp8::Bits::Usual,
                                                  std::move(on_progress));
    }
    return kernels;
}

KernelChoice kept_kernels(const KernelNames& kept, const DeviceOptions& options) {
    KernelChoice kernels{kept, true};
    // Before there was a choice, bf16 products were the engine's.
    if (kernels.chosen.contains("gemm") && !kernels.chosen.contains("fp8"))
        kernels.chosen.try_emplace("bf16", "decoded");
    if (!options.gemm_class.empty())
        kernels.chosen["gemm"] = options.gemm_class;
    return kernels;
}

KernelChoice named_kernels(Precision precision) {
    const std::string key = products_key(precision), wanted = wanted_variants(key);
    return is_named(wanted) ? KernelChoice{{{key, wanted}}, true} : KernelChoice{};
}

bool wants_copies_of_weights(Device& device, Precision precision, const KernelNames* kept) {
    const std::string key = products_key(precision);
    if (key.empty())
        return false;
    const fp8::Variant variant = key == "bf16" ? fp8::Variant::Direct : fp8::Variant::Packed;
    const auto reads_copies = [&](const fp8::ProductKind& kind, fp8::Variant of) {
        return kind.form != GemmForm::TN &&
               (of == variant || (of == fp8::Variant::Native && kind.form == GemmForm::NN));
    };
    std::string text = wanted_variants(key);
    if (text == "measured")
        return fp8::why_not(device, variant).empty();
    if (!is_named(text)) {
        text = kept != nullptr ? kept_kernels(*kept, device.options()).chosen[key] : "";
        if (text.empty()) // nothing is kept of a run in another precision
            text = usual_products(device, key);
    }
    try {
        const fp8::Choice choice = parse_products(device, key, text);
        const auto& kinds = fp8::product_kinds();
        return std::any_of(kinds.begin(), kinds.end(), [&](const fp8::ProductKind& kind) {
            return reads_copies(kind, choice.at(kind));
        });
    } catch (const Error&) { // who needs it will say so
        return false;
    }
}

fp8::Choice products_of(const KernelNames& kept, Precision precision, Device& device) {
    const std::string key = products_key(precision), wanted = wanted_variants(key);
    fp8::Choice choice(fp8::Variant::Decoded);
    if (key.empty())
        return choice;
    const auto known = kept.find(key);
    std::string text = known == kept.end() ? "decoded" : known->second;
    if (is_named(wanted))
        text = wanted;
    try {
        choice = parse_products(device, key, text);
    } catch (const Error& error) {
        if (error.code() != ErrorCode::Unsupported)
            throw;
    }
    take_kept_tiles(device, choice);
    return choice;
}

} // namespace bellows
