// test_documents.cpp: reading documents from any place on, filters, counts by source, shards that are taken up again.
#include <random>

#include "data/resume.h"
#include "dev/test/data_testing.h"
#include "dev/test/packing.h"

namespace {

using Documents = DataTest;

// What makes a raw document, for comparison.
std::string told(const RawDocument& doc, const std::string& text) {
    return format("%s:%lld #%lld %d [%s] %s", doc.file->path.c_str(), (long long)doc.line, (long long)doc.ordinal, doc.json,
                  std::string(doc.in(text)).c_str(), doc.broken ? doc.broken->what.c_str() : "");
}

// The oracle is the unbroken reading: from each place that it passed, the rest is the same.
TEST_F(Documents, ReadingGoesOnFromEveryPlace) {
    std::string lines = "\xEF\xBB\xBF\n{\"text\": \"first\"}\r\n\n  \n";
    for (int i = 0; i < 40; i++) {
        lines += format("{\"text\": \"%d%s\"}\n", i, std::string(i * 7 % 50, 'x').c_str()) + (i % 9 ? "" : "\n");
    }
    const std::string text = "\n\none\ntwo\n\nthree\r\n\r\n\nfour four four four\nfive\n--\nsix";
    const std::string half = lines.substr(0, lines.size() / 2), rest = lines.substr(half.size());
    const std::vector<std::string> names = {write_file("a.jsonl", lines + "{\"cut"),
                                            write_file("b.txt", text),
                                            write_file("c.jsonl.gz", gzip(half) + gzip(rest)),
                                            write_file("d.jsonl.zst", zstd(lines).substr(0, zstd(lines).size() - 5)),
                                            write_file("e.jsonl", ""),
                                            write_file("f.txt.gz", gzip(text).substr(0, 30)),
                                            write_file("g.txt", "\xEF\xBB\xBF")};
    const Filter filter({});
    for (const ReadOptions& options : {ReadOptions{}, ReadOptions{"auto", "text", "blank-lines", 0}, ReadOptions{"auto", "text", "--", 0},
                                       ReadOptions{"auto", "text", "", 12}, ReadOptions{"txt", "text", "", 0}}) {
        const std::vector<InputFile> files = list_inputs(names, options.input_format);
        std::vector<std::string> all;
        std::vector<InputPosition> places = {{}};
        DocumentReader reader(files, options, filter);
        std::string read;
        for (RawDocument doc; reader.next(doc, read);) {
            all.push_back(told(doc, read));
            places.push_back(doc.after);
        }
        EXPECT_EQ(reader.packed_done(),
                  std::accumulate(files.begin(), files.end(), (i64)0, [](i64 n, const InputFile& f) { return n + f.size; }));
        EXPECT_GE(all.size(), 6u);
        for (size_t from = 0; from < places.size(); from++) {
            DocumentReader again(files, options, filter, places[from]);
            std::vector<std::string> found(all.begin(), all.begin() + from);
            for (RawDocument doc; again.next(doc, read);) { found.push_back(told(doc, read)); }
            ASSERT_EQ(found, all) << "from place " << from;
        }
    }
}

TEST_F(Documents, AnotherFileIsNotGoneOnWith) {
    const std::string path = write_file("a.jsonl", "{\"text\": \"one\"}\n{\"text\": \"two\"}\n");
    const Filter filter({});
    std::vector<InputFile> files = {input_file(path)};
    RawDocument doc;
    std::string read;
    DocumentReader(files, {}, filter).next(doc, read);
    write_file("a.jsonl", "{\"text\": \"ONE\"}\n{\"text\": \"two\"}\n");
    EXPECT_SAYS(failure_of([&] { DocumentReader(files, {}, filter, doc.after).next(doc, read); }).message, "starts otherwise");
}

// Lines as they come from the file, in whatever pieces: against a plain split of the text.
TEST_F(Documents, LinesOfEveryLength) {
    std::string text;
    std::vector<std::string> wanted;
    for (const size_t n : {0, 1, 5, (1 << 20) - 8, 1 << 20, (1 << 20) + 1, 3 << 20, 2}) {
        wanted.push_back(std::string(n, 'x') + "\n");
        text += wanted.back();
    }
    wanted.push_back("the last has no end");
    text += wanted.back();
    for (const std::string& path : {write_file("a", text), write_file("a.gz", gzip(text)), write_file("a.zst", zstd(text))}) {
        for (const size_t limit : {(size_t)2 << 20, (size_t)4 << 20}) {
            LineReader reader(input_file(path));
            std::string line;
            for (const std::string& w : wanted) {
                line.clear();
                const bool fits = w.size() <= limit;
                EXPECT_EQ(reader.read_line(line, limit), fits ? LineReader::Line::whole : LineReader::Line::too_long);
                if (fits) { EXPECT_TRUE(line == w); }
            }
            EXPECT_EQ(reader.read_line(line, limit), LineReader::Line::none);
            EXPECT_EQ(reader.offset(), (i64)text.size());
            EXPECT_EQ(reader.lines(), (i64)wanted.size());
        }
    }
}

// A gzip file may be packed in parts. Here they end everywhere in the buffer that the file is read into, and some hold nothing. A part that is
// changed anywhere is never taken for whole; the oracle of the bytes that come before is the text.
TEST_F(Documents, GzipInManyParts) {
    std::mt19937 random(1);
    std::string text, packed;
    while (packed.size() < (3 << 20)) {
        std::string part(random() % 200 ? random() % 300 : random() % 300'000, '\0');
        for (char& c : part) { c = "abcdefgh\n"[random() % 9]; }
        text += part;
        packed += gzip(part);
    }
    const auto unpacked = [&](const std::string& bytes, std::string& out) {
        InputStream stream(input_file(write_file("a.gz", bytes)));
        std::string buffer(1 + random() % 100'000, '\0');
        while (const size_t n = stream.read(buffer.data(), buffer.size())) { out.append(buffer, 0, n); }
        return stream.problem();
    };
    for (int i = 0; i < 5; i++) {
        std::string out;
        EXPECT_FALSE(unpacked(packed, out));
        EXPECT_TRUE(out == text);
    }
    const std::string small = text.substr(0, 3000), whole = gzip(small);
    for (size_t end = 1; end < whole.size(); end++) {
        std::string out;
        EXPECT_TRUE(unpacked(whole.substr(0, std::max<size_t>(end, 2)), out)) << end;
        EXPECT_TRUE(small.starts_with(out)) << end;
    }
    constexpr size_t HEADER = 10, TRAILER = 8;  // what a changed header says of name and time is nobody's business
    for (size_t at = HEADER; at < whole.size(); at++) {
        std::string out, changed = whole;
        changed[at] ^= 1 << random() % 8;
        const auto problem = unpacked(changed, out);
        ASSERT_TRUE(problem) << at;
        if (at >= whole.size() - TRAILER) {
            EXPECT_EQ(problem->problem, Problem::wrong_checksum) << at;
            EXPECT_TRUE(out == small) << at;
        }
    }
    std::string out, changed = zstd(text, 1);
    changed.back() ^= 1;
    EXPECT_EQ(unpacked(changed, out)->problem, Problem::wrong_checksum);
    EXPECT_TRUE(out == text);
}

TEST(Filters, Conditions) {
    const FieldValue three = {3.0, ""}, word = {{}, "head"}, digit = {{}, "3"};
    struct Case {
        const char* condition;
        FieldValue value;
        std::optional<bool> holds;
    };
    const Case cases[] = {{"x>=3", three, true},    {"x>3", three, false},   {"x<3", three, false},   {"x<=3", three, true},
                          {"x=3", three, true},     {"x==3.0", three, true}, {"x!=3", three, false},  {" x = head ", word, true},
                          {"x!=head", word, false}, {"x=tail", word, false}, {"x>=3", word, {}},      {"x=3", digit, true},
                          {"x=head", three, {}},    {"x<1e3", three, true},  {"x>-2.5", three, true}, {"x!=tail", word, true}};
    for (const Case& c : cases) { EXPECT_EQ(Condition(c.condition).holds(c.value), c.holds) << c.condition; }
    for (const char* bad : {"", "x", "x>", ">3", "x>head", "x=>3", "x<>3", "x<nan", "x<inf", "x>=1,5", "x!3"}) {
        EXPECT_EQ(failure_of([&] { Condition{bad}; }).exit_code, EXIT_USAGE) << bad;
    }
}

TEST_F(Documents, IdsAndTheFilesOfSignals) {
    EXPECT_EQ(document_id("/rp/documents/2023-06/0003/en_head.json.gz", 18), "2023-06/0003/en_head.json.gz/17");
    EXPECT_EQ(document_id("/x.json", 1), "x.json/0");
    EXPECT_EQ(document_id("/a/./b/../c/x.json", 1), "a/c/x.json/0");
    const IdSet ids(write_file("ids.gz", gzip("b/1\r\na/17  \n\nc/3")));
    for (const char* id : {"b/1", "a/17", "c/3"}) { EXPECT_TRUE(ids.contains(id)) << id; }
    for (const char* id : {"", "b/10", "a/1", "c/"}) { EXPECT_FALSE(ids.contains(id)) << id; }
    const std::string deep = write_file("signals/2023-06/0001/en_head.signals.json.gz", ""),
                      flat = write_file("signals/en_tail.signals.json.gz", "");
    EXPECT_EQ(signals_path(path("signals"), "/rp/documents/2023-06/0001/en_head.json.gz"), deep);
    EXPECT_EQ(signals_path(path("signals"), "2023-06/0001/en_head.json.gz"), deep);
    EXPECT_EQ(signals_path(path("signals"), "/rp/documents/2023-06/0002/en_head.json.gz"), "");
    EXPECT_EQ(signals_path(path("signals"), "/rp/documents/2023-06/0002/en_tail.json.gz"), flat);
    EXPECT_EQ(signals_path(path("signals"), "a.txt"), "");
}

// Lines with a few characters changed: taken where a strict parser takes them, whatever field the change is in, and refused elsewhere.
TEST_F(Documents, LinesAreTakenAsAStrictParserTakesThem) {
    const std::string lines[] = {
        R"({"text": "a\n\u0041", "b": null, "c": [1, -2.5e+3, true, {"d": "x\"y", "e": []}], "score": 0.25, "f": {}})",
        R"({"meta": {"n": [[], [0], {"q": false}], "s": "\/\b"}, "score": "high", "text": "t", "z": -0})"};
    const std::string_view characters = "{}[]\",:\\tfnulre0123456789.-+E \t/";
    const FilterOptions with_score = {"", {"score>=0"}, ""}, without = {};
    const Filter filters[] = {Filter(with_score), Filter(without)};
    const InputFile file;
    std::mt19937 random(1);
    Parsers parsers;
    i64 taken = 0, refused = 0;
    for (int i = 0; i < 60000; i++) {
        std::string line = lines[random() % 2];
        for (int n = random() % 3; n >= 0; n--) {
            const size_t at = random() % line.size();
            const char c = characters[random() % characters.size()];
            if (random() % 3 == 0) {
                line.erase(at, 1);
            } else if (random() % 2 == 0) {
                line.insert(at, 1, c);
            } else {
                line[at] = c;
            }
        }
        nlohmann::json json;
        try {
            json = nlohmann::json::parse(line);
        } catch (const nlohmann::json::parse_error&) {  // json is no object then
        } catch (const nlohmann::json::out_of_range&) { continue; }  // 1e999 is a number, but not for that parser
        RawDocument raw;
        raw.file = &file;
        raw.json = true;
        line.reserve(line.size() + LINE_PADDING);
        const Document doc = parse_document(raw, line, {}, filters[i % 2], parsers);
        const bool bad = !doc.problems.empty() && doc.problems[0].problem == Problem::bad_json;
        ASSERT_EQ(bad, !json.is_object()) << line;
        if (!bad && !doc.skipped) { ASSERT_EQ(doc.text, json.at("text").get<std::string>()) << line; }
        (bad ? refused : taken)++;
    }
    EXPECT_GT(taken, 5000);
    EXPECT_GT(refused, 5000);
    const auto nested = [&](int depth) {
        RawDocument raw;
        std::string line = R"({"text": "t", "deep": )" + std::string(depth, '[') + std::string(depth, ']') + "}";
        line.reserve(line.size() + LINE_PADDING);
        raw.file = &file;
        raw.json = true;
        return !parse_document(raw, line, {}, filters[1], parsers).skipped;
    };
    EXPECT_TRUE(nested(900));
    EXPECT_FALSE(nested(1 << 20));  // which would take all of the stack
}

TEST(SourceCounts, AreOfFoldersWhereFilesAreMany) {
    std::vector<InputFile> files;
    for (int i = 0; i < 3000; i++) { files.push_back({format("/d/%d/%d/x.jsonl", i % 7, i % 1500), 1}); }
    Summary summary(files, false);
    for (const InputFile& f : files) {
        Work work;
        work.file = &f;
        work.kept = true;
        work.text_bytes = 10;
        EXPECT_TRUE(summary.add(work));
    }
    const auto json = summary.to_json();
    EXPECT_EQ(json.size(), 7u);
    EXPECT_EQ(json[0].at("source"), "/d/0");
    EXPECT_EQ(summary.total().documents, 3000);
    Summary again(files, false);
    again.set_from_json(json);
    EXPECT_EQ(again.to_json(), json);
}

// Whoever publishes removes what the state lists.
TEST_F(Documents, AStateDoesNotNameFilesElsewhere) {
    const std::vector<InputFile> none;
    RunState state;
    state.inputs = &none;
    state.options = state.sources = RunState::Json::object();
    state.replaces = {"x_000000.bin"};
    write_run_state(path("x"), state);
    EXPECT_EQ(read_run_state(path("x"), state).replaces.back(), "x_000000.bin");
    for (const char* name : {"../y", "/etc/hosts", ""}) {
        state.replaces = {name};
        write_run_state(path("x"), state);
        EXPECT_SAYS(failure_of([&] { read_run_state(path("x"), state); }).message, "without a folder");
    }
}

// Taken up from any state after more was written: the files of an unbroken writing.
TEST_F(Documents, ShardsAreTakenUpAgain) {
    for (const i64 vocab : {1000, 70000}) {
        std::mt19937 random(vocab);
        std::vector<std::vector<int32_t>> documents(120);
        for (auto& d : documents) {
            for (int n = random() % 40; n > 0; n--) { d.push_back(random() % vocab); }
        }
        ShardWriter whole(path("whole"), vocab, 50);
        for (const auto& d : documents) { whole.write(d); }
        whole.publish();
        std::vector<ShardInfo> state;
        size_t saved = 0;
        while (saved < documents.size()) {
            ShardWriter writer(path("parts"), vocab, 50);
            writer.resume(state);
            for (const int last = saved + random() % 20 + 1; (int)saved < last && saved < documents.size(); saved++) {
                writer.write(documents[saved]);
            }
            writer.sync();
            state = writer.shards();
            writer.keep();
            for (size_t i = saved; i < std::min(saved + random() % 6, documents.size()); i++) { writer.write(documents[i]); }  // lost
        }
        ShardWriter writer(path("parts"), vocab, 50);
        writer.resume(state);
        writer.publish();
        ASSERT_EQ(writer.shards().size(), whole.shards().size());
        for (size_t i = 0; i < whole.shards().size(); i++) {
            EXPECT_TRUE(read_text_file(shard_path(path("parts"), i)) == read_text_file(shard_path(path("whole"), i))) << i;
            EXPECT_EQ(writer.shards()[i].xxh3, whole.shards()[i].xxh3);
            EXPECT_EQ(file_xxh3(shard_path(path("parts"), i)), whole.shards()[i].xxh3);
        }
    }
}

}  // namespace
