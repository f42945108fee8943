// test_profile.cpp: what ops are said to cost, and what is made of a timeline. Oracle: arrays and pairs counted by hand.
#include <gtest/gtest.h>

#include "llmc/profile.h"
#include "llmc/tp.h"

namespace {

struct Costs : testing::Test {
    ::Run run{1};
    float f[1] = {};
    int i[1] = {};
    bf16 x[1] = {};
    bf16* const no_x = nullptr;
    float* const none = nullptr;
    const NormKind rms = {true, 1e-5f};
};

TEST_F(Costs, Norms) {
    const Blocks<bf16> block = {x, 4, DType::FP32, x, 2, 4};
    EXPECT_EQ(costs::residual_norm_forward(x, x, none, f, x, &block, no_x, x, no_x, rms, 10, 6, run).bytes, 10 * (3 * 6 * 2 + 4 * 4 + 2 * 2 + 4));
    EXPECT_EQ(costs::residual_norm_forward(no_x, x, none, f, x, (const Blocks<bf16>*)nullptr, no_x, x, no_x, rms, 10, 6, run).bytes, 10 * (2 * 6 * 2 + 4));
    EXPECT_EQ(costs::norm_backward(x, true, x, 4, DType::BF16, 4, f, none, x, x, none, f, x, rms, GradMode::WRITE, 10, 6, run).bytes, 10 * (4 * 6 * 2 + 4 * 2 + 4));
}
TEST_F(Costs, Products) {
    EXPECT_EQ(costs::matmul_wgrad(f, none, x, 5, x, 10, 3, 5, 1.0f, GradMode::ADD, run).bytes, 10 * 5 * 2 + 10 * 3 * 2 + 2 * 15 * 4);
    EXPECT_EQ(costs::matmul_wgrad(f, f, x, 5, x, 10, 3, 5, 1.0f, GradMode::ADD, run).bytes, 2 * 10 * 5 * 2 + 10 * 3 * 2 + 2 * 15 * 4);
    EXPECT_EQ(costs::matmul_wgrad(f, nullptr, x, 5, x, 10, 3, 5, 1.0f, GradMode::WRITE, run).bytes, 10 * 5 * 2 + 10 * 3 * 2 + 15 * 4);
    EXPECT_EQ(costs::matmul_wgrad(x, nullptr, x, 5, x, 10, 3, 5, 1.0f, GradMode::ADD, run).bytes, 10 * 5 * 2 + 10 * 3 * 2 + 2 * 15 * 2);
    EXPECT_EQ(costs::matmul_dgrad(f, x, 5, x, 10, 3, 5, 1.0f, false, run).bytes, 10 * 5 * 2 + 15 * 2 + 30 * 4);
    EXPECT_EQ(costs::matmul_forward(x, 5, x, x, no_x, 10, 3, 5, 1.0f, run).flops, 2 * 10 * 3 * 5);
}
TEST_F(Costs, Attention) {
    const Cost forward = costs::attention_forward(x, f, x, x, x, nullptr, 3, 2, 3, 4, 2, 5, run), backward = costs::attention_backward(x, x, x, x, x, f, x, x, x, 2, 3, 4, 2, 5, run);
    EXPECT_EQ(forward.bytes, 2 * (4 * 3 * 5 * 2 + 2 * 3 * 5 * 2) * 2 + 2 * 4 * 3 * 4);
    EXPECT_EQ(backward.bytes, 2 * (4 * 3 * 5 * 4 + 2 * 3 * 5 * 4) * 2 + 2 * 4 * 3 * 4);
    const i64 pairs = 1 + 2 + 3;
    EXPECT_EQ(forward.flops, 2 * 4 * pairs * 2 * 2 * 5);
    EXPECT_EQ(backward.flops, 2 * 4 * pairs * 4 * 2 * 5);
}
TEST_F(Costs, Others) {
    EXPECT_EQ(costs::rope_split_forward(x, x, x, x, f, f, nullptr, 3, 2, 3, 4, 2, 5, run).bytes, 2 * 6 * 8 * 5 * 2);
    EXPECT_EQ(costs::embedding_backward(f, f, i, {0, 7}, 10, 6, GradMode::ADD, run).bytes, 10 * 6 * 4 + 2 * 7 * 6 * 4);
    EXPECT_EQ(costs::adamw_update(f, nullptr, f, f, f, 9, AdamW(), run).bytes, 9 * (4 + 8 * 3));
    EXPECT_EQ(costs::adamw_update(x, nullptr, f, f, f, 9, AdamW(), run).bytes, 9 * (4 + 8 * 3));
    EXPECT_EQ(costs::adamw_update(x, nullptr, f, f, x, 9, AdamW(), run).bytes, 9 * (2 + 8 * 3));
}

TEST(Timeline, KeepsSpansUntilTheyAreTaken) {
    ::Run run(1);
    Timeline timeline(run);
    const int sum = timeline.open("sum", Timeline::SUMS, {0, 8});
    { const Timeline::Scope scope(&timeline, "op", [] { return Cost{2, 4}; }); }
    timeline.close(sum), timeline.close(sum);  // the second says nothing new
    const auto spans = timeline.take();
    ASSERT_EQ(spans.size(), 2u);
    EXPECT_TRUE(0 <= spans[0].begin && spans[0].begin <= spans[1].begin && spans[1].begin <= spans[1].end && spans[1].end <= spans[0].end);
    EXPECT_EQ(spans[1].cost.flops, 2);
    EXPECT_TRUE(timeline.take().empty());
    timeline.open("never closed", Timeline::WORK, {});
    EXPECT_THROW(timeline.take(), Error);
}
TEST(Timeline, TheTableIsOfTheMeanStep) {
    Profile profile;
    profile.add({{"a", Timeline::WORK, {3e9, 0}, 0.0, 0.1}, {"a", Timeline::WORK, {3e9, 0}, 0.1, 0.4}, {"sum", Timeline::SUMS, {}, 0.0, 0.5}}, 0.5);
    profile.add({{"b", Timeline::WORK, {0, 2e9}, 0.0, 0.5}}, 0.5);
    const std::string table = profile.table();
    for (const char* line : {"b                              0     250.00   50.0%          -       4.0", "a                              1     200.00   40.0%       15.0         -",
                             "everything else                0      50.00   10.0%", "step                                 500.00  100.0%   mean of 2 steps"}) {
        EXPECT_NE(table.find(line), std::string::npos) << line << " is not in\n" << table;
    }
    EXPECT_LT(table.find("\nb "), table.find("\na "));
}
TEST(Timeline, ATraceNamesEachRank) {
    const auto events = trace_events({{"op", Timeline::WORK, {}, 1.0, 1.5}, {"sum", Timeline::SUMS, {}, 1.0, 2.0}}, 3);
    ASSERT_EQ(events.size(), 4u);
    EXPECT_EQ(events[1]["dur"], 5e5);
    EXPECT_EQ(events[2]["ph"], "b");
    EXPECT_EQ(events[3]["ts"], 2e6);
    EXPECT_EQ(events[2]["id"], events[3]["id"]);
    for (const auto& event : events) { EXPECT_EQ(event["pid"], 3); }
}

}  // namespace
