// test_init.cpp: the first weights: the generator against known answers, the normals, and that T does not matter.
#include <gtest/gtest.h>

#include "llmc/init.h"
#include "tiny_models.h"

namespace {

TEST(Init, PhiloxKnownAnswers) {  // Random123's kat_vectors, philox 4x32 10
    const uint32_t ones = 0xFFFFFFFF;
    const struct {
        uint32_t counter[4];
        uint64_t key;
        uint32_t wanted[4];
    } cases[] = {
        {{0, 0, 0, 0}, 0, {0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8}},
        {{ones, ones, ones, ones}, 0xFFFFFFFFFFFFFFFF, {0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD}},
        {{0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344}, 0x299F31D0A4093822, {0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1}},
    };
    for (const auto& c : cases) {
        uint32_t words[4][PHILOX_LANES] = {};
        for (int w = 0; w < 4; w++) { words[w][5] = c.counter[w]; }
        philox4x32_10(words, 6, c.key);
        for (int w = 0; w < 4; w++) { EXPECT_EQ(words[w][5], c.wanted[w]); }
    }
}

TEST(Init, NormalsAreNormal) {
    std::vector<float> x(1 << 20);
    fill_normal(1, fnv1a_64("x"), 0, x.size(), 1.0f, x.data());
    double moments[5] = {}, neighbours = 0, below = 0;
    for (size_t i = 0; i < x.size(); i++) {
        for (int k = 1; k <= 4; k++) { moments[k] += std::pow((double)x[i], k) / x.size(); }
        neighbours += (double)x[i] * x[(i + 1) % x.size()] / x.size();
        below += (x[i] < 1.0f) / (double)x.size();
    }
    EXPECT_NEAR(moments[1], 0, 0.004);  // four standard errors
    EXPECT_NEAR(moments[2], 1, 0.006);
    EXPECT_NEAR(moments[3], 0, 0.016);
    EXPECT_NEAR(moments[4], 3, 0.040);
    EXPECT_NEAR(neighbours, 0, 0.004);
    EXPECT_NEAR(below, 0.841345, 0.0015);
}

// Against libm in double: the same angles and radii, so a slip in the series or in the reduction shows.
TEST(Init, SeriesAgreeWithLibm) {
    for (uint64_t bits = 0; bits <= 0xFFFFFFFF; bits += 65521) {
        const double u = (float)(int32_t)((uint32_t)bits >> 1 | 1) * 0x1p-31;
        EXPECT_NEAR(minus_log_uniform((uint32_t)bits), -std::log(u), 1e-10 - 4e-7 * std::log(u));
        const Direction d = uniform_direction((uint32_t)bits);
        const double angle = (double)((int32_t)(bits & 0xFFFFFFFC)) * 0x1p-31 * M_PI / 4, sign = bits & 1 ? -1 : 1;
        EXPECT_NEAR(d.x, sign * (bits & 2 ? std::sin(angle) : std::cos(angle)), 1.5e-7);
        EXPECT_NEAR(d.y, sign * (bits & 2 ? std::cos(angle) : std::sin(angle)), 1.5e-7);
    }
}

// The bits themselves: the same on every machine and at every optimisation level. A change here is a change of every seed.
TEST(Init, BitsAreFixed) {
    std::vector<float> x(1001);
    fill_normal(0x123456789ABCDEF, fnv1a_64("model.embed_tokens.weight"), 12345678901, x.size(), 0.02f, x.data());
    EXPECT_EQ(fnv1a_64(std::string_view((const char*)x.data(), x.size() * 4)), 12330984846707591226u);
}

TEST(Init, EveryTensorParallelDegreeDrawsTheSameModel) {
    for (ModelConfig model : {tiny_llama(), tiny_gpt()}) {
        for (const auto& [T, multiple] :
             std::vector<std::pair<int, i64>>{{1, 0}, {2, 0}, {3, 0}, {4, 0}, {6, 0}, {12, 0}, {12, 8}, {4, 128}}) {
            model.vocab_multiple = multiple;
            std::map<std::string, std::vector<int>> drawn;  // how often each element of a Hugging Face tensor was seen
            for (int rank = 0; rank < T; rank++) {
                const ParameterTable table(model, tiny_specs(model), T, rank);
                for (const Tensor& t : table.tensors()) {
                    std::vector<float> local(t.count() + 1, 7.0f);
                    init_tensor(t, model, 42, local.data());
                    ASSERT_EQ(local.back(), 7.0f) << t.spec.name;
                    const float stddev = t.spec.init == Init::NORMAL ? 0.02f : (float)(0.02 / std::sqrt(2.0 * model.layers));
                    for (const Slice& s : t.slices) {
                        const i64 count = s.part.hf_rows * s.hf_cols;
                        std::vector<float> whole(count);
                        if (t.spec.init == Init::ONE) { std::fill(whole.begin(), whole.end(), 1.0f); }
                        if (t.spec.init == Init::NORMAL || t.spec.init == Init::NORMAL_RESIDUAL) {
                            fill_normal(42, fnv1a_64(s.part.name), 0, count, stddev, whole.data());
                        }
                        std::vector<int>& seen = drawn[s.part.name];
                        seen.resize(count);
                        for (i64 i = 0; i < s.rows; i++) {
                            for (i64 j = 0; j < s.cols; j++) {
                                seen[s.hf_index(i, j)]++;
                                ASSERT_EQ(local[(s.local_row + i) * t.cols + j], whole[s.hf_index(i, j)]) << s.part.name;
                            }
                        }
                    }
                }
            }
            for (const auto& [name, seen] : drawn) {
                for (int times : seen) { ASSERT_EQ(times, seen[0]) << name << " at T = " << T; }
                EXPECT_TRUE(seen[0] == 1 || seen[0] == T) << name;
            }
        }
    }
}

}  // namespace
