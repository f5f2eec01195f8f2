// SPDX-License-Identifier: MIT
// Products of bf16 linear layers: how they go stays with a run, and the transposed copies of
// weights that they want are there where they are wanted and follow the weights.
#include "support/bf16_products.hpp"
#include "support/compare.hpp"
#include "support/small_run.hpp"
#include "support/temporary_folder.hpp"
#include "support/test_device.hpp"

#include <bellows/base/error.hpp>
#include <bellows/run/kernels.hpp>
#include <bellows/train/checkpoints.hpp>
#include <bellows/train/optimizer.hpp>
#include <bellows/train/trainer.hpp>

#include <cstdlib>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace bellows {
namespace {

using testing::Bf16Products;
using testing::choice_of;

std::vector<std::uint16_t> bits_of(Device& device, const TensorView& view) {
    auto bits = testing::read_back<std::uint16_t>(device, view.buffer);
    bits.resize(view.num_elements());
    return bits;
}

/// The copies of a store whose products go Direct.
void expect_copies(ParameterStore& store) {
    std::size_t turned = 0, others = 0;
    for (const Parameter& parameter : store.all()) {
        const ParameterInfo& info = parameter.info;
        const bool wanted = is_linear(info) && info.shape[1] >= 128;
        ASSERT_EQ(static_cast<bool>(parameter.turned.buffer), wanted) << info.name;
        ++(wanted ? turned : others);
        if (!wanted)
            continue;
        const std::size_t out = info.shape[0], in = info.shape[1];
        ASSERT_EQ(parameter.turned.extent[0], in);
        ASSERT_EQ(parameter.turned.extent[1], out);
        const auto compute = bits_of(store.device(), parameter.compute),
                   copy = bits_of(store.device(), parameter.turned);
        std::vector<std::uint16_t> expected(compute.size());
        for (std::size_t row = 0; row < out; ++row)
            for (std::size_t column = 0; column < in; ++column)
                expected[column * out + row] = compute[row * in + column];
        EXPECT_EQ(copy, expected) << info.name;
    }
    EXPECT_GT(turned, 0u);
    EXPECT_GT(others, 0u);
}

TEST(TransposedWeights, FollowTheWeights) {
    const auto device = testing::make_device();
    const ModelConfig model = wide_model();
    ParameterStore store(*device, parameters(model), DType::BF16);
    const auto choice = testing::direct_choice(*device);
    if (!choice)
        return;
    store.initialise(1);
    store.use_products(*choice);
    {
        SCOPED_TRACE("when products first want them");
        expect_copies(store);
    }
    store.initialise(2);
    {
        SCOPED_TRACE("initialised");
        expect_copies(store);
    }
    std::uint64_t seed = 5;
    for (const ParameterInfo& info : parameters(model))
        store.upload(info.name, test::random_f32(info.size(), ++seed, -3, 3));
    {
        SCOPED_TRACE("loaded");
        expect_copies(store);
    }
    Optimizer optimizer(store, {});
    const auto gradients = test::random_f32(store.num_elements(), 4);
    device->upload(store.flat_gradients().buffer, std::span<const float>(gradients));
    const TensorView one = store.experts(1, "gate_up_proj").turned;
    const auto before = bits_of(*device, one);
    optimizer.update(1, 0.1, 1);
    device->wait_idle();
    {
        SCOPED_TRACE("updated");
        expect_copies(store);
    }
    EXPECT_NE(bits_of(*device, one), before);
    // The experts of a layer as one tensor.
    ASSERT_EQ(one.rank, 3u);
    EXPECT_EQ(one.extent[0], model.routed_experts);
    EXPECT_EQ(one.extent[1], model.hidden);
    EXPECT_EQ(one.extent[2], 2 * model.moe_ffn);
    const auto all = bits_of(*device, one);
    std::vector<std::uint16_t> expected;
    for (std::uint64_t e = 0; e < model.routed_experts; ++e)
        for (const std::uint16_t bits :
             bits_of(*device, store
                                  .at("model.layers.1.mlp.experts." + std::to_string(e) +
                                      ".gate_up_proj.weight")
                                  .turned))
            expected.push_back(bits);
    EXPECT_EQ(all, expected);
    store.use_products(fp8::Choice(fp8::Variant::Decoded));
    for (const Parameter& parameter : store.all())
        EXPECT_FALSE(parameter.turned.buffer) << "nobody wants it any more";
}

TEST(TransposedWeights, AreMadeForBf16TrainingAlone) {
    const auto device = testing::make_device();
    const auto choice = testing::direct_choice(*device);
    if (!choice)
        return;
    const auto copies_of = [&](DType activation, bool training, LinearPrecision linear,
                               const fp8::Choice& products) {
        ParameterStore store(*device, parameters(wide_model()), activation, training, linear);
        const std::uint64_t before = device->memory_report().bytes;
        store.use_products(products);
        std::size_t copies = 0;
        for (const Parameter& parameter : store.all())
            copies += parameter.turned.buffer ? 1 : 0;
        EXPECT_EQ(device->memory_report().bytes > before, copies > 0);
        return copies;
    };
    constexpr auto kPlain = LinearPrecision::AsActivations;
    const fp8::Choice engine(fp8::Variant::Decoded);
    EXPECT_GT(copies_of(DType::BF16, true, kPlain, *choice), 0u);
    EXPECT_EQ(copies_of(DType::BF16, true, kPlain, engine), 0u);
    EXPECT_EQ(copies_of(DType::BF16, false, kPlain, *choice), 0u) << "no gradients";
    EXPECT_EQ(copies_of(DType::F32, true, kPlain, *choice), 0u);
    EXPECT_EQ(copies_of(DType::BF16, true, LinearPrecision::Fp8, *choice), 0u);
}

RunConfig bf16_run() {
    RunConfig run = small_run();
    run.model = wide_model();
    run.train.precision = Precision::BF16;
    run.train.seq = 16;
    return run;
}

/// The variable while it lives, for those that ask for kernels.
class Wanted {
public:
    explicit Wanted(const char* value) { ::setenv(kBf16VariantsVariable, value, 1); }
    Wanted(const Wanted&) = delete;
    ~Wanted() { ::unsetenv(kBf16VariantsVariable); }
};

/// What a trainer takes that is given these kernels.
std::string taken(Device& device, const KernelChoice& kernels) {
    World world = World::single();
    const Trainer trainer(device, world, bf16_run(), {}, kernels);
    return trainer.chosen_kernels().at("bf16");
}

KernelChoice wanted_kernels(Device& device, const std::optional<Checkpoint>& before = {}) {
    return choose_kernels(device, Precision::BF16, before ? &before->state().kernels : nullptr,
                          true, {});
}

TEST(ChoiceOfBf16Products, StaysWithTheRun) {
    TemporaryFolder folder;
    SavedRun options;
    options.config = bf16_run();
    options.out = folder.path();
    const auto device = testing::make_device();
    World world = World::single();
    const std::string usual = describe(*device, fp8::usual_choice_of_bf16(*device));
    const bool direct = fp8::why_not(*device, fp8::Variant::Direct).empty();
    std::optional<Checkpoint> saved;
    {
        Trainer trainer(*device, world, options.config, {}, wanted_kernels(*device));
        EXPECT_EQ(trainer.chosen_kernels().at("bf16"), usual);
        EXPECT_EQ(wants_copies_of_weights(*device, Precision::BF16, nullptr),
                  usual.find("direct") != std::string::npos);
        trainer.step(0, fill_sequence);
        device->wait_idle();
        saved.emplace(Checkpoint::open(save_checkpoint(
            options.out, {{kConfigFile, options.config_text()}}, trainer, world, 1)));
        EXPECT_EQ(saved->state().kernels, trainer.chosen_kernels());
    }
    EXPECT_EQ(describe(*device, products_of(saved->state().kernels, options.config.train.precision,
                                            *device)),
              usual);
    const KernelChoice kept = wanted_kernels(*device, saved);
    EXPECT_TRUE(kept.binding);
    EXPECT_EQ(taken(*device, kept), usual);
    if (device->info().is_cpu) {
        EXPECT_EQ(usual, "decoded") << "a CPU's matrices are slow";
    }

    // The environment goes before both.
    const Wanted engine("decoded");
    EXPECT_EQ(named_kernels(options.config.train.precision).chosen.at("bf16"), "decoded");
    EXPECT_EQ(taken(*device, wanted_kernels(*device)), "decoded");
    EXPECT_EQ(taken(*device, wanted_kernels(*device, saved)), "decoded");
    EXPECT_FALSE(wants_copies_of_weights(*device, Precision::BF16, &saved->state().kernels));
    const Wanted named("direct");
    EXPECT_EQ(wants_copies_of_weights(*device, Precision::BF16, &saved->state().kernels), direct);
    if (direct) {
        EXPECT_EQ(taken(*device, wanted_kernels(*device)),
                  describe(*device, fp8::of_bf16(fp8::Variant::Direct)));
        return;
    }
    EXPECT_EQ(taken(*device, {{{"bf16", "direct"}}, false}), "decoded");
    EXPECT_EQ(describe(*device, products_of(saved->state().kernels, options.config.train.precision,
                                            *device)),
              "decoded");
    try {
        taken(*device, wanted_kernels(*device));
        ADD_FAILURE() << "computed otherwise";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::Unsupported);
        EXPECT_NE(error.message().find("BELLOWS_BF16_VARIANTS=decoded"), std::string::npos)
            << error.message();
    }
}

TEST(ChoiceOfBf16Products, OfAnotherDeviceIsNotReplaced) {
    const auto device = testing::make_device();
    const std::string elsewhere = "decoded; direct [direct-bf16-k99]: nt.dense.bf16.more";
    EXPECT_EQ(taken(*device, {{{"bf16", elsewhere}}, false}), "decoded");
    try {
        taken(*device, {{{"bf16", elsewhere}}, true});
        ADD_FAILURE() << "computed otherwise";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::Unsupported);
        for (const char* part : {"direct-bf16-k99", "BELLOWS_BF16_VARIANTS=decoded"})
            EXPECT_NE(error.message().find(part), std::string::npos) << error.message();
    }
}

// Shows on GPUs, whose usual choice has others than Decoded.
TEST(ChoiceOfBf16Products, EntriesGoBeforeTheWordForAllOthers) {
    const auto device = testing::make_device();
    fp8::Choice expected = parse_products(*device, "bf16", "device");
    EXPECT_EQ(describe(*device, expected), usual_products(*device, "bf16"));
    fp8::Choice wanted(fp8::Variant::Device);
    for (const fp8::ProductKind& kind : fp8::product_kinds())
        if (kind.form == GemmForm::NN)
            for (fp8::Choice* choice : {&wanted, &expected})
                choice->set(kind, fp8::Variant::Decoded);
    EXPECT_EQ(parse_products(*device, "bf16", describe(*device, wanted)), expected);
}

// Before there was a choice, the engine computed them, whatever the device usually takes now.
TEST(ChoiceOfBf16Products, OldCheckpointsHaveTheEngines) {
    TemporaryFolder folder;
    const auto device = testing::make_device();
    const auto old = [&](std::uint64_t step, const std::map<std::string, std::string>& kernels) {
        begin_checkpoint(folder.path(), step);
        CheckpointState state;
        state.step = step;
        state.kernels = kernels;
        return std::optional(Checkpoint::open(commit_checkpoint(folder.path(), state, {}, {})));
    };
    const std::string gemm = gemm_class(*device).name;
    const auto bf16 = old(1, {{"gemm", gemm}});
    EXPECT_EQ(wanted_kernels(*device, bf16).chosen.at("bf16"), "decoded");
    EXPECT_EQ(taken(*device, wanted_kernels(*device, bf16)), "decoded");
    EXPECT_FALSE(wants_copies_of_weights(*device, Precision::BF16, &bf16->state().kernels));
    EXPECT_EQ(products_of(bf16->state().kernels, bf16_run().train.precision, *device),
              fp8::Choice(fp8::Variant::Decoded));
    const auto fp8 = old(2, {{"gemm", gemm}, {"fp8", "decoded"}});
    EXPECT_FALSE(kept_kernels(fp8->state().kernels, device->options()).chosen.contains("bf16"));
    DeviceOptions named = device->options();
    for (const char* gemm_class : {"", gemm.c_str()}) { // which BELLOWS_GEMM_CLASS may name
        named.gemm_class = gemm_class;
        EXPECT_FALSE(kept_kernels(old(3, {})->state().kernels, named).chosen.contains("bf16"))
            << "f32";
    }
}

} // namespace
} // namespace bellows
