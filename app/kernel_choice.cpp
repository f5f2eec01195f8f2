// SPDX-License-Identifier: MIT
#include "app/kernel_choice.hpp"

#include "app/product_times.hpp"

#include <bellows/base/error.hpp>
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

} // namespace bellows
