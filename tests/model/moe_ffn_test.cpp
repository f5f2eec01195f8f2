// SPDX-License-Identifier: MIT
// One MoE layer across ranks, two micro-batches in flight, every exchange delayed at random:
// outputs, input gradients and weight gradients against the f64 reference, and the same bits
// whether work runs serially, overlapped or in a shuffled order.

#include "support/bf16_products.hpp"
#include "support/compare.hpp"
#include "support/mpi_test.hpp"
#include "support/test_device.hpp"
#include "verify/reference/balance.hpp"
#include "verify/reference/moe_layer.hpp"
#include "verify/reference/ops.hpp"

#include <bellows/comm/host_collectives.hpp>
#include <bellows/model/moe_ffn.hpp>

#include <cstring>
#include <map>
#include <ostream>

namespace bellows {
namespace {

using testing::read_back;
using testing::world;

constexpr std::size_t kMicroBatches = 2;

struct Case {
    const char* name;
    std::uint64_t experts, top_k, shared;
    DType dtype;
    std::uint32_t alignment;
    /// Tokens of a rank in a micro-batch.
    std::uint64_t (*tokens)(int rank, std::size_t micro_batch);
    /// Of the balance loss; large, so that it shows beside the gradient of a random dy.
    double alpha = 0;
    std::uint64_t sequences = 1; ///< of a rank's micro-batch
    LinearPrecision linear = LinearPrecision::AsActivations;
    bool codes = false; ///< travel to the experts
    ExchangeLayout layout = ExchangeLayout::ExpertMajor;
    testing::Bf16Products products = testing::Bf16Products::Engine;
    void (*losses)(ModelConfig&) = nullptr; ///< of the router, other than alpha's usual one
};

void PrintTo(const Case& c, std::ostream* out) {
    *out << c.name;
}

ModelConfig config_of(const Case& c) {
    ModelConfig config;
    config.vocabulary = 16;
    const bool wide = c.products != testing::Bf16Products::Engine; // enough for a tile
    config.hidden = wide ? 136 : 48;
    config.layers = 1;
    config.dense_layers = 0;
    config.heads = 2;
    config.kv_lora_rank = 16;
    config.qk_nope_head_dim = 16;
    config.qk_rope_head_dim = 8;
    config.v_head_dim = 16;
    config.moe_ffn = wide ? 72 : 32;
    config.routed_experts = c.experts;
    config.shared_experts = c.shared;
    config.top_k = c.top_k;
    config.router_bias = true;
    config.init_std = 0.2;
    config.balance_loss_alpha = c.alpha;
    if (c.losses)
        c.losses(config);
    return config;
}

/// The parameters of the layer's FFN that a rank owns.
std::vector<ParameterInfo> parameters_of_rank(const ModelConfig& config,
                                              const reference::ExpertPartition& partition,
                                              std::size_t rank) {
    std::vector<ParameterInfo> mine;
    for (const ParameterInfo& info : parameters(config)) {
        const bool ffn = info.name.find(".mlp.") != std::string::npos ||
                         info.name.find("post_attention") != std::string::npos;
        const bool here =
            info.expert < 0 || partition.owner(static_cast<std::size_t>(info.expert)) == rank;
        if (ffn && here)
            mine.push_back(info);
    }
    return mine;
}

/// Every other sequence, where some are spared.
std::vector<std::uint32_t> spared_of(const Case& c, const ModelConfig& config, std::size_t m) {
    std::vector<std::uint32_t> spared(config.capacity_spares > 0 ? c.sequences : 0);
    for (std::size_t i = 0; i < spared.size(); ++i)
        spared[i] = (i + m) % 2;
    return spared;
}

/// What a value is rounded to on the device.
std::vector<float> stored(std::vector<float> values, DType dtype) {
    if (dtype == DType::BF16)
        for (float& value : values)
            value = test::round_to_bf16(value);
    return values;
}

std::vector<float> values_for(const ParameterInfo& info, DType dtype) {
    std::uint64_t seed = 7;
    for (const char c : info.name)
        seed = seed * 131 + static_cast<unsigned char>(c);
    const bool gain = info.kind == ParameterKind::Norm;
    const double spread = info.kind == ParameterKind::RouterBias ? 0.05 : 0.3;
    return stored(test::random_f32(info.size(), seed, gain ? 0.5 : -spread, gain ? 1.5 : spread),
                  dtype);
}

std::vector<float> input(std::uint64_t tokens, std::uint64_t hidden, int rank, std::size_t m,
                         int what, DType dtype) {
    return stored(test::random_f32(tokens * hidden, 1000 + static_cast<std::uint64_t>(rank) * 100 +
                                                        m * 10 + static_cast<std::uint64_t>(what)),
                  dtype);
}

TensorView tensor(const Buffer& buffer, DType dtype, std::uint64_t rows, std::uint64_t columns) {
    return buffer.tensor(dtype, {rows, columns});
}

void upload(Device& device, const TensorView& view, const std::vector<float>& values) {
    if (view.dtype == DType::F32) {
        device.upload(view.buffer, std::span<const float>(values));
        return;
    }
    std::vector<std::uint16_t> bits;
    for (const float value : values)
        bits.push_back(test::bf16_bits(value));
    device.upload(view.buffer, std::span<const std::uint16_t>(bits));
}

std::vector<float> download(Device& device, const TensorView& view) {
    if (view.dtype == DType::F32)
        return read_back<float>(device, view.buffer);
    std::vector<float> values;
    for (const std::uint16_t bits : read_back<std::uint16_t>(device, view.buffer))
        values.push_back(test::from_bf16(bits));
    return values;
}

/// What one rank computes on its device.
struct Results {
    std::vector<std::vector<float>> y, dx; ///< per micro-batch
    std::map<std::string, std::vector<float>> gradients;
    std::vector<std::uint32_t> loads;
    bool operator==(const Results&) const = default;
};

Results run_layer(const Case& c, const DeviceOptions& options, Transport& transport) {
    const ModelConfig config = config_of(c);
    const auto ranks = static_cast<std::size_t>(world().size());
    const auto rank = static_cast<std::size_t>(world().rank());
    const reference::ExpertPartition partition{c.experts, ranks};

    auto device = testing::make_device(options);
    HostThread thread(*device, "exchange");
    thread.delay_jobs(std::chrono::microseconds(800), 5 + rank);
    std::uint64_t most = 1;
    for (std::size_t r = 0; r < ranks; ++r)
        for (std::size_t m = 0; m < kMicroBatches; ++m)
            most = std::max(most, c.tokens(static_cast<int>(r), m));
    ExchangeConfig wires{.num_experts = c.experts,
                         .top_k = c.top_k,
                         .hidden = config.hidden,
                         .max_tokens = most,
                         .dtype = c.dtype,
                         .layout = c.layout,
                         .alignment = c.alignment};
    if (c.codes)
        wires.token_wire = wires.gradient_wire = DType::F8E4M3;
    ExpertExchange exchange(*device, world(), transport, thread, wires);
    ParameterStore store(*device, parameters_of_rank(config, partition, rank), c.dtype, true,
                         c.linear);
    if (c.products != testing::Bf16Products::Engine)
        store.use_products(choice_of(*device, c.products));
    store.initialise(1);
    for (const Parameter& parameter : store.all())
        store.upload(parameter.info.name, values_for(parameter.info, c.dtype));
    MoeFfn layer(config, 0, store, exchange);

    std::vector<Buffer> buffers;
    std::vector<SlotDesc> descs;
    std::vector<std::unique_ptr<LayerSlot>> slots;
    for (std::size_t m = 0; m < kMicroBatches; ++m) {
        const std::uint64_t tokens = c.tokens(world().rank(), m);
        const auto make = [&](const char* name) {
            buffers.emplace_back(*device, BufferDesc{.name = name,
                                                     .bytes = std::max<std::uint64_t>(
                                                         tokens * config.hidden * 4, 16)});
            return tensor(buffers.back(), c.dtype, tokens, config.hidden);
        };
        SlotDesc desc{"slot " + std::to_string(m), tokens, tokens / c.sequences, {}};
        desc.loss_scale = 1 / static_cast<float>(std::max<std::uint64_t>(tokens, 1));
        desc.tensors = {make("x"), make("y"), make("dy"), make("dx")};
        if (tokens > 0) {
            upload(*device, desc.tensors.x,
                   input(tokens, config.hidden, world().rank(), m, 0, c.dtype));
            upload(*device, desc.tensors.dy,
                   input(tokens, config.hidden, world().rank(), m, 1, c.dtype));
        }
        if (const auto spared = spared_of(c, config, m); !spared.empty() && tokens > 0) {
            buffers.emplace_back(*device, BufferDesc{.name = "spared", .bytes = 16});
            desc.spared = buffers.back().tensor(DType::U32, {spared.size()});
            device->upload(desc.spared.buffer, std::span<const std::uint32_t>(spared));
        }
        descs.push_back(desc);
        slots.push_back(layer.create_slot(desc));
    }
    // Both micro-batches in flight, node by node; weight gradients in ascending order at the end.
    for (const NodeKind kind : {NodeKind::Forward, NodeKind::InputGradient})
        for (std::size_t i = 0; i < slots[0]->nodes(kind).size(); ++i)
            for (auto& slot : slots)
                slot->nodes(kind)[i].submit({});
    for (auto& slot : slots)
        for (const Node& node : slot->nodes(NodeKind::WeightGradient))
            node.submit({});
    device->wait_idle();

    Results results;
    for (const SlotDesc& desc : descs) {
        const bool some = desc.tokens > 0;
        results.y.push_back(some ? download(*device, desc.tensors.y) : std::vector<float>{});
        results.dx.push_back(some ? download(*device, desc.tensors.dx) : std::vector<float>{});
    }
    for (const Parameter& parameter : store.all())
        if (parameter.info.trainable())
            results.gradients[parameter.info.name] = store.download_gradient(parameter.info.name);
    results.loads = read_back<std::uint32_t>(*device, layer.expert_loads().buffer);
    EXPECT_GT(device->num_checked_accesses(), 0u);
    return results;
}

/// The same on all ranks at once in f64; [micro-batch][rank] and summed gradients by name.
struct Expected {
    std::vector<std::vector<reference::Vector>> y, dx;
    std::map<std::string, reference::Vector> gradients;
};

void add_to(reference::Vector& sum, const reference::Vector& part) {
    sum.resize(std::max(sum.size(), part.size()));
    for (std::size_t i = 0; i < part.size(); ++i)
        sum[i] += part[i];
}

/// The gradients of the router's losses, per rank, as moe_backward() takes them.
struct RouterLosses {
    std::vector<reference::Vector> dscores, dlogits;
};

/// counts: for the kind Global, per rank those of the step's micro-batches so far.
RouterLosses router_losses(const Case& c, const reference::MoeForward& forward,
                           std::vector<reference::BalanceCounts>& counts) {
    using namespace reference;
    const ModelConfig config = config_of(c);
    const RouterShape shape = moe_shape(config).router;
    const BalanceShape balance = balance_shape(config);
    RouterLosses losses;
    for (std::size_t r = 0; r < forward.tokens.size(); ++r) {
        const RankTokens& t = forward.tokens[r];
        const std::size_t tokens = t.tokens;
        if (config.has_balance_loss()) {
            auto of_runs = balance_counts(t.scores, t.experts, shape, balance,
                                          config.balances_sequences() ? c.sequences : 1);
            if (config.balance_loss == BalanceLossKind::Global) {
                of_runs[0] = counts.size() > r ? sum(counts[r], of_runs[0]) : of_runs[0];
                counts.resize(std::max(counts.size(), r + 1));
                counts[r] = of_runs[0];
            }
            losses.dscores.push_back(
                balance_loss(t.scores, of_runs, shape, balance, tokens).dscores);
        }
        if (config.router_z_loss > 0)
            losses.dlogits.push_back(
                router_z_loss(t.logits, shape.experts, tokens, config.router_z_loss).dlogits);
    }
    return losses;
}

Expected expect_layer(const Case& c) {
    using namespace reference;
    const ModelConfig config = config_of(c);
    const auto ranks = static_cast<std::size_t>(world().size());
    const ExpertPartition partition{c.experts, ranks};
    std::map<std::string, Vector> values;
    for (const ParameterInfo& info : parameters(config))
        values[info.name] = test::to_double(values_for(info, c.dtype));
    const std::string mlp = "model.layers.0.mlp.";
    MoeWeights weights;
    weights.router = values[mlp + "gate.weight"];
    weights.bias = values[mlp + "gate.e_score_correction_bias"];
    for (std::size_t e = 0; e < c.experts; ++e) {
        weights.gate_up.push_back(
            values[mlp + "experts." + std::to_string(e) + ".gate_up_proj.weight"]);
        weights.down.push_back(values[mlp + "experts." + std::to_string(e) + ".down_proj.weight"]);
    }
    if (c.shared > 0) {
        weights.shared_gate_up = values[mlp + "shared_experts.gate_up_proj.weight"];
        weights.shared_down = values[mlp + "shared_experts.down_proj.weight"];
    }
    const std::string gain_name = "model.layers.0.post_attention_layernorm.weight";
    const Vector& gain = values[gain_name];

    Expected expected;
    std::vector<BalanceCounts> counts;
    for (std::size_t m = 0; m < kMicroBatches; ++m) {
        std::vector<Vector> x, dy, n;
        std::vector<RmsNorm> norms;
        for (std::size_t r = 0; r < ranks; ++r) {
            const int rank = static_cast<int>(r);
            const std::uint64_t tokens = c.tokens(rank, m);
            x.push_back(test::to_double(input(tokens, config.hidden, rank, m, 0, c.dtype)));
            dy.push_back(test::to_double(input(tokens, config.hidden, rank, m, 1, c.dtype)));
            norms.push_back(rmsnorm_forward(x[r], gain, tokens, config.hidden, config.norm_eps));
            n.push_back(norms[r].y);
        }
        MoeShape shape = moe_shape(config);
        shape.spared = spared_of(c, config, m);
        const MoeForward forward = moe_forward(n, weights, shape, partition);
        const RouterLosses losses = router_losses(c, forward, counts);
        const MoeGrads grads =
            moe_backward(dy, n, forward, weights, shape, partition, losses.dscores, losses.dlogits);
        expected.y.emplace_back();
        expected.dx.emplace_back();
        for (std::size_t r = 0; r < ranks; ++r) {
            Vector y = x[r], dx = dy[r];
            add_to(y, forward.tokens[r].y);
            const std::size_t tokens = x[r].size() / config.hidden;
            add_to(dx, rmsnorm_input_grad(grads.dx[r], x[r], gain, norms[r].inv_rms, tokens,
                                          config.hidden));
            add_to(expected.gradients[gain_name],
                   rmsnorm_gain_grad(grads.dx[r], x[r], norms[r].inv_rms, tokens, config.hidden));
            expected.y.back().push_back(y);
            expected.dx.back().push_back(dx);
        }
        add_to(expected.gradients[mlp + "gate.weight"], grads.weights.router);
        for (std::size_t e = 0; e < c.experts; ++e) {
            const std::string expert = mlp + "experts." + std::to_string(e);
            add_to(expected.gradients[expert + ".gate_up_proj.weight"], grads.weights.gate_up[e]);
            add_to(expected.gradients[expert + ".down_proj.weight"], grads.weights.down[e]);
        }
        if (c.shared > 0) {
            add_to(expected.gradients[mlp + "shared_experts.gate_up_proj.weight"],
                   grads.weights.shared_gate_up);
            add_to(expected.gradients[mlp + "shared_experts.down_proj.weight"],
                   grads.weights.shared_down);
        }
    }
    return expected;
}

/// f32: a few hundred roundings of 2^-24 each. bf16: every stored intermediate is rounded to 2^-9,
/// and gradients are sums of such with cancellation. FP8: what enters a product is rounded by up to
/// 2^-4.
double tolerance(const Case& c) {
    return c.linear == LinearPrecision::Fp8 ? 2e-2 : c.dtype == DType::F32 ? 2e-11 : 3e-4;
}

void expect_close(const std::vector<float>& actual, const reference::Vector& expected,
                  const Case& c, const std::string& what) {
    ASSERT_EQ(actual.size(), expected.size()) << what;
    EXPECT_LE(test::calc_diff(actual, expected), tolerance(c)) << what;
    double largest = 1e-6;
    for (const double value : expected)
        largest = std::max(largest, std::abs(value));
    const double bound = c.linear == LinearPrecision::Fp8 ? 0.3
                         : c.dtype == DType::F32          ? 2e-5
                                                 : 0.05; // of the largest: one wrong row shows
    EXPECT_TRUE(test::elements_match(actual, expected, {}, test::within(bound * largest, 0)))
        << what;
}

void check_against_reference(const Case& c, const Results& results) {
    const Expected expected = expect_layer(c);
    const auto rank = static_cast<std::size_t>(world().rank());
    for (std::size_t m = 0; m < kMicroBatches; ++m) {
        expect_close(results.y[m], expected.y[m][rank], c, "y " + std::to_string(m));
        expect_close(results.dx[m], expected.dx[m][rank], c, "dx " + std::to_string(m));
    }
    HostCollectives collectives(world(), Group::all(world().size()));
    for (const auto& [name, gradient] : results.gradients) {
        const bool expert = name.find(".experts.") != std::string::npos;
        std::vector<double> sum(gradient.begin(), gradient.end());
        if (!expert) // every rank has its tokens' part
            collectives.all_reduce_sum(std::span<double>(sum));
        expect_close(test::to_float(sum), expected.gradients.at(name), c, name);
    }
}

/// That a layer without the router's losses would be found out.
void check_that_losses_show(const Case& c) {
    Case without = c;
    without.alpha = 0;
    without.losses = nullptr;
    const std::string gate = "model.layers.0.mlp.gate.weight";
    EXPECT_GT(test::calc_diff(test::to_float(expect_layer(without).gradients.at(gate)),
                              expect_layer(c).gradients.at(gate)),
              1e-2);
}

TEST(MoeFfn, RefusesRowsThatItsProductsDoNotTake) {
    auto device = testing::make_device();
    const auto transport = open_transport(world());
    HostThread thread(*device, "exchange");
    const ModelConfig config = config_of({"", 8, 2, 1, DType::F32, 1, nullptr});
    ParameterStore f32(*device, {}, DType::F32),
        fp8(*device, {}, DType::F32, true, LinearPrecision::Fp8);
    const auto refused = [&](ParameterStore& store, const ExchangeConfig& wires) {
        ExpertExchange exchange(*device, world(), *transport, thread, wires);
        try {
            MoeFfn layer(config, 0, store, exchange);
        } catch (const Error& error) {
            return error.code() == ErrorCode::InvalidArgument;
        }
        return false;
    };
    ExchangeConfig wires{.num_experts = 8, .top_k = 2, .hidden = config.hidden, .max_tokens = 8};
    EXPECT_FALSE(refused(f32, wires));
    wires.layout = ExchangeLayout::ExpertSlots;
    EXPECT_TRUE(refused(f32, wires));
    EXPECT_TRUE(refused(fp8, wires));
    wires.token_wire = DType::F8E4M3;
    EXPECT_TRUE(refused(fp8, wires)) << "gradients as they are";
    wires.gradient_wire = DType::F8E4M3;
    EXPECT_FALSE(refused(fp8, wires));
    EXPECT_TRUE(refused(f32, wires));
    wires.layout = ExchangeLayout::RankMajor;
    EXPECT_TRUE(refused(fp8, wires));
    for (const LinearPrecision precision : {LinearPrecision::AsActivations, LinearPrecision::Fp8}) {
        ExchangeConfig chosen = expert_exchange_config(config, DType::F32, precision);
        chosen.max_tokens = 8;
        const bool codes = precision == LinearPrecision::Fp8;
        EXPECT_EQ(chosen.token_wire.has_value(), codes);
        EXPECT_FALSE(refused(codes ? fp8 : f32, chosen));
        EXPECT_EQ(refused(codes ? f32 : fp8, chosen), codes) << "FP8 takes tokens as they are, too";
    }
}

class MoeFfnAcrossRanks : public ::testing::TestWithParam<Case> {};

TEST_P(MoeFfnAcrossRanks, MatchesTheReferenceInEveryOrder) {
    const Case& c = GetParam();
    const auto transport = open_transport(world());
    DeviceOptions options = testing::test_options();
    options.sync = SyncMode::Overlap;
    bool goes_direct = false;
    options.on_pipeline_compiled = [&](const std::string& kernel, std::uint32_t) {
        goes_direct = goes_direct || kernel == "gemm_direct_nt";
    };
    const Results overlap = run_layer(c, options, *transport);
    options.on_pipeline_compiled = {};
    if (c.products == testing::Bf16Products::Direct) {
        ALL_RANKS_TRUE(goes_direct == testing::direct_choice(*testing::make_device()).has_value());
    }
    check_against_reference(c, overlap);
    if (c.alpha > 0 || c.losses)
        check_that_losses_show(c);
    if (c.layout == ExchangeLayout::ExpertSlots) { // the same bits wherever rows stand
        Case gathered = c;
        gathered.layout = ExchangeLayout::ExpertMajor;
        ALL_RANKS_TRUE(run_layer(gathered, options, *transport) == overlap);
    } else if (c.codes) { // and whether they are quantised before they travel or after
        Case plain = c;
        plain.codes = false;
        const Results after = run_layer(plain, options, *transport);
        ALL_RANKS_TRUE(after.y == overlap.y && after.dx == overlap.dx);
    }
    options.sync = SyncMode::Serial;
    ALL_RANKS_TRUE(run_layer(c, options, *transport) == overlap);
    options.sync = SyncMode::Shuffle; // another order with each number of ranks
    options.shuffle_seed = static_cast<std::uint64_t>(world().size());
    ALL_RANKS_TRUE(run_layer(c, options, *transport) == overlap);
    std::vector<std::int64_t> slots{0, 0};
    for (const std::uint32_t load : overlap.loads)
        slots[0] += load;
    for (std::size_t m = 0; m < kMicroBatches; ++m)
        slots[1] += static_cast<std::int64_t>(c.tokens(world().rank(), m) * c.top_k);
    EXPECT_EQ(slots[0], slots[1]) << "every slot is counted once";
}

// Tokens wide enough for Direct choose all experts: many are too near each other in bf16.
INSTANTIATE_TEST_SUITE_P(
    Cases, MoeFfnAcrossRanks,
    ::testing::Values(
        Case{"even", 8, 2, 1, DType::F32, 1, [](int, std::size_t) -> std::uint64_t { return 32; }},
        Case{"uneven_with_an_empty_rank", 7, 3, 1, DType::F32, 1,
             [](int rank, std::size_t m) -> std::uint64_t {
                 return rank == 1 ? 0 : 13 + static_cast<std::uint64_t>(rank) * 8 + m;
             }},
        Case{"fewer_experts_than_ranks", 3, 2, 0, DType::F32, 8,
             [](int, std::size_t m) -> std::uint64_t { return 20 + m; }},
        Case{"bf16", 8, 2, 1, DType::BF16, 16,
             [](int, std::size_t) -> std::uint64_t { return 40; }},
        Case{"usual_products_bf16", 4, 4, 1, DType::BF16, 16,
             [](int, std::size_t) -> std::uint64_t { return 40; }, 0, 1,
             LinearPrecision::AsActivations, false, ExchangeLayout::ExpertMajor,
             testing::Bf16Products::Usual},
        Case{"direct_products_bf16", 4, 4, 1, DType::BF16, 1,
             [](int rank, std::size_t m) -> std::uint64_t {
                 return rank == 1 ? 0 : 13 + static_cast<std::uint64_t>(rank) * 8 + m;
             },
             0, 1, LinearPrecision::AsActivations, false, ExchangeLayout::ExpertMajor,
             testing::Bf16Products::Direct},
        Case{"balance_loss", 7, 3, 1, DType::F32, 1,
             [](int rank, std::size_t m) -> std::uint64_t {
                 return rank == 1 ? 0 : 3 * (7 + static_cast<std::uint64_t>(rank) + m);
             },
             300, 3},
        Case{"balance_loss_bf16", 8, 2, 1, DType::BF16, 16,
             [](int, std::size_t) -> std::uint64_t { return 40; }, 300, 4},
        Case{"losses_of_devices", 8, 3, 1, DType::F32, 1,
             [](int, std::size_t m) -> std::uint64_t { return 3 * (9 + m); }, 0, 3,
             LinearPrecision::AsActivations, false, ExchangeLayout::ExpertMajor,
             testing::Bf16Products::Engine,
             [](ModelConfig& config) {
                 config.balance_loss = BalanceLossKind::Expert;
                 config.balance_devices = 4;
                 config.balance_loss_alpha = 100;
                 config.device_loss_alpha = 200;
                 config.communication_loss_alpha = 150;
             }},
        Case{"global_balance_loss_and_z_loss", 7, 2, 1, DType::F32, 1,
             [](int rank, std::size_t m) -> std::uint64_t {
                 return 12 + 5 * static_cast<std::uint64_t>(rank) + 7 * m;
             },
             300, 1, LinearPrecision::AsActivations, false, ExchangeLayout::ExpertMajor,
             testing::Bf16Products::Engine,
             [](ModelConfig& config) {
                 config.balance_loss = BalanceLossKind::Global;
                 config.router_z_loss = 2;
             }},
        Case{"capacity_of_devices", 8, 3, 1, DType::F32, 1,
             [](int rank, std::size_t m) -> std::uint64_t {
                 return rank == 1 ? 0 : 21 + static_cast<std::uint64_t>(rank) + m;
             },
             0, 1, LinearPrecision::AsActivations, false, ExchangeLayout::ExpertMajor,
             testing::Bf16Products::Engine,
             [](ModelConfig& config) {
                 config.balance_devices = 4;
                 config.capacity_factor = 0.75;
             }},
        Case{"capacity_with_spared_sequences", 8, 2, 1, DType::F32, 1,
             [](int rank, std::size_t) -> std::uint64_t { return rank == 1 ? 0 : 24; }, 0, 4,
             LinearPrecision::AsActivations, false, ExchangeLayout::ExpertMajor,
             testing::Bf16Products::Engine,
             [](ModelConfig& config) {
                 config.capacity_of = CapacityOf::Expert;
                 config.capacity_factor = 0.75;
                 config.capacity_spares = 0.5;
             }},
        // In f32, whose scores are near enough to drop what the reference drops.
        Case{"capacity_of_experts_fp8_by_slots", 8, 2, 1, DType::F32, 1,
             [](int, std::size_t) -> std::uint64_t { return 20; }, 0, 1, LinearPrecision::Fp8, true,
             ExchangeLayout::ExpertSlots, testing::Bf16Products::Engine,
             [](ModelConfig& config) {
                 config.capacity_of = CapacityOf::Expert;
                 config.capacity_factor = 0.75;
             }},
        Case{"fp8", 8, 2, 1, DType::BF16, 1, [](int, std::size_t) -> std::uint64_t { return 40; },
             0, 1, LinearPrecision::Fp8},
        Case{"fp8_codes_travel", 8, 2, 1, DType::BF16, 1,
             [](int, std::size_t) -> std::uint64_t { return 40; }, 0, 1, LinearPrecision::Fp8,
             true},
        Case{"fp8_uneven_with_an_empty_rank", 7, 3, 1, DType::F32, 16,
             [](int rank, std::size_t m) -> std::uint64_t {
                 return rank == 1 ? 0 : 13 + static_cast<std::uint64_t>(rank) * 8 + m;
             },
             0, 1, LinearPrecision::Fp8, true},
        Case{"fp8_by_slots", 8, 2, 1, DType::BF16, 1,
             [](int, std::size_t) -> std::uint64_t { return 40; }, 0, 1, LinearPrecision::Fp8, true,
             ExchangeLayout::ExpertSlots},
        Case{"fp8_by_slots_uneven_with_an_empty_rank", 7, 3, 1, DType::F32, 1,
             [](int rank, std::size_t m) -> std::uint64_t {
                 return rank == 1 ? 0 : 13 + static_cast<std::uint64_t>(rank) * 8 + m;
             },
             0, 1, LinearPrecision::Fp8, true, ExchangeLayout::ExpertSlots}),
    [](const auto& test) { return std::string(test.param.name); });

} // namespace
} // namespace bellows
