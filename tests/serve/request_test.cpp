// SPDX-License-Identifier: MIT
#include "support/temporary_folder.hpp"

#include <bellows/serve/request.hpp>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

using namespace bellows;

namespace {

constexpr std::uint64_t kVocabulary = 1000;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

Request good() {
    Request request;
    request.prompt = {1, 999};
    request.end_tokens = {2};
    request.stop = {"\n\n", "né"};
    request.log_probs = true;
    request.top_log_probs = 20;
    request.sampling = {.temperature = 0.7,
                        .seed = 0,
                        .top_k = 40,
                        .top_p = 0.9,
                        .min_p = 0.05,
                        .repetition_penalty = 1.1,
                        .frequency_penalty = -2,
                        .presence_penalty = 2,
                        .logit_bias = {{3, -kInfinity}, {4, 100}}};
    return request;
}

struct Fault {
    std::function<void(Request&)> change;
    std::string says;
};

} // namespace

TEST(Request, TakesWhatIsInRange) {
    validate(good(), kVocabulary);
    Request plain;
    plain.prompt = {0};
    validate(plain, 1);
    validate(SamplingParams{}, 1);
}

TEST(Request, RefusesByFieldAndSaysWhatIsAccepted) {
    const std::vector<Fault> faults = {
        {[](Request& r) { r.prompt.clear(); }, "prompt is empty; accepted is at least one token"},
        {[](Request& r) { r.prompt[1] = 1000; }, "a token of prompt is 1000; accepted is"},
        {[](Request& r) { r.end_tokens = {5, 2000}; }, "end_tokens is 2000"},
        {[](Request& r) { r.max_tokens = 0; }, "max_tokens is 0; accepted is at least 1"},
        {[](Request& r) { r.stop.assign(17, "x"); }, "stop is 17 strings; accepted is at most 16"},
        {[](Request& r) { r.stop = {""}; }, "stop is 0 bytes long; accepted is 1 to 1024"},
        {[](Request& r) { r.stop = {std::string(1025, 'x')}; }, "stop is 1025 bytes"},
        {[](Request& r) { r.stop = {"\xc3"}; }, "stop is \"\\xc3\"; accepted is UTF-8"},
        {[](Request& r) { r.top_log_probs = 21; }, "top_log_probs is 21; accepted is at most 20"},
        {[](Request& r) { r.log_probs = false; }, "0 where log_probs is off"},
        {[](Request& r) { r.sampling.temperature = -0.1; },
         "temperature is -0.1; accepted is a number from 0 to 1000"},
        {[](Request& r) { r.sampling.temperature = std::nan(""); }, "temperature is nan"},
        {[](Request& r) { r.sampling.temperature = kInfinity; }, "temperature is inf"},
        {[](Request& r) { r.sampling.top_p = 0; }, "top_p is 0; accepted is a number above 0"},
        {[](Request& r) { r.sampling.top_p = 1e-60; }, "top_p is 1e-60"},
        {[](Request& r) { r.sampling.top_p = 1.01; }, "top_p is 1.01"},
        {[](Request& r) { r.sampling.min_p = -1; }, "min_p is -1; accepted is"},
        {[](Request& r) { r.sampling.min_p = 2; }, "min_p is 2"},
        {[](Request& r) { r.sampling.repetition_penalty = 0; }, "repetition_penalty is 0;"},
        {[](Request& r) { r.sampling.frequency_penalty = 2.5; }, "frequency_penalty is 2.5;"},
        {[](Request& r) { r.sampling.presence_penalty = -2.5; }, "presence_penalty is -2.5;"},
        {[](Request& r) { r.sampling.logit_bias = {{1000, 1}}; }, "logit_bias is 1000;"},
        {[](Request& r) { r.sampling.logit_bias = {{7, 101}}; }, "logit_bias of token 7 is 101;"},
        {[](Request& r) { r.sampling.logit_bias = {{7, kInfinity}}; }, "token 7 is inf"},
        {[](Request& r) { r.sampling.logit_bias = {{7, 1}, {7, 2}}; }, "token 7 is given twice"},
    };
    for (const Fault& fault : faults) {
        Request request = good();
        fault.change(request);
        EXPECT_BELLOWS_ERROR(validate(request, kVocabulary), InvalidArgument, fault.says);
    }
}

TEST(Request, ReasonsHaveNames) {
    EXPECT_STREQ(to_string(FinishReason::EndToken), "end token");
    EXPECT_STREQ(to_string(FinishReason::Failed), "failed");
}
