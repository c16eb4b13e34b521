// Kafka's own share consumer against our listener: each case says PASS or FAIL, its name, and why.

import java.time.Duration;
import java.util.*;
import java.util.function.Predicate;
import java.util.stream.*;
import org.apache.kafka.clients.admin.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.*;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.serialization.*;

public class ShareConsumers {
    static final long PATIENCE_MS = 60_000;
    static String server;

    interface Case { void run(String topic, String group) throws Exception; }

    public static void main(String[] arguments) {
        server = arguments[0];
        Map<String, Case> cases = new LinkedHashMap<>();
        cases.put("implicit", ShareConsumers::implicit);
        cases.put("explicit", ShareConsumers::explicit);
        cases.put("commit-async", ShareConsumers::commitAsync);
        cases.put("record-limit", ShareConsumers::recordLimit);
        cases.put("several", ShareConsumers::several);
        cases.put("close", ShareConsumers::close);
        cases.put("renew", ShareConsumers::renew);
        cases.put("lost-lease", ShareConsumers::lostLease);
        cases.put("latest", ShareConsumers::latest);
        cases.put("admin", ShareConsumers::admin);
        for (var one : cases.entrySet()) {
            try {
                String topic = "share-" + one.getKey();
                make(topic, "group." + one.getKey());
                one.getValue().run(topic, "group." + one.getKey());
                System.out.println("PASS " + one.getKey());
            } catch (Throwable wrong) {
                System.out.println("FAIL " + one.getKey() + " " + wrong.toString().replace('\n', ' '));
            }
        }
    }

    // ---- cases ----

    static void implicit(String topic, String group) throws Exception {
        send(topic, 0, 100);
        try (var consumer = consumer(group, topic, Map.of())) {
            var got = poll(consumer, all -> all.size() >= 100);
            check(values(got).size() == 100 && got.stream().allMatch(one -> count(one) == 1), "100, once each");
            consumer.commitSync().forEach((where, failed) -> check(failed.isEmpty(), where + ": " + failed));
        }
        nothingIsLeft(topic, group);
    }

    static void explicit(String topic, String group) throws Exception {
        send(topic, 0, 30);
        try (var consumer = consumer(group, topic, explicitly())) {
            Map<String, Integer> accepted = new HashMap<>();
            Set<String> rejected = new HashSet<>();
            until(() -> accepted.size() + rejected.size() == 30, () -> {
                for (var one : consumer.poll(Duration.ofMillis(500))) {
                    int number = Integer.parseInt(one.value());
                    if (number % 3 == 0 && count(one) == 1) {
                        consumer.acknowledge(one, AcknowledgeType.RELEASE);
                    } else if (number % 3 == 1) {
                        consumer.acknowledge(one, AcknowledgeType.REJECT);
                        rejected.add(one.value());
                    } else {
                        consumer.acknowledge(one, AcknowledgeType.ACCEPT);
                        accepted.put(one.value(), count(one));
                    }
                }
                consumer.commitSync().forEach((at, failed) -> check(failed.isEmpty(), at + ": " + failed));
            });
            check(rejected.size() == 10, "10 were rejected");
            accepted.forEach((value, times) ->
                check(times == (Integer.parseInt(value) % 3 == 0 ? 2 : 1), value + " came " + times + " times"));
        }
        nothingIsLeft(topic, group);
    }

    static void commitAsync(String topic, String group) throws Exception {
        send(topic, 0, 20);
        Map<TopicIdPartition, Set<Long>> told = new HashMap<>();
        List<Exception> failed = new ArrayList<>();
        try (var consumer = consumer(group, topic, Map.of())) {
            consumer.setAcknowledgementCommitCallback((offsets, wrong) -> {
                if (wrong != null) failed.add(wrong);
                offsets.forEach((at, some) -> told.computeIfAbsent(at, any -> new HashSet<>()).addAll(some));
            });
            poll(consumer, all -> all.size() >= 20);
            consumer.commitAsync();
            until(() -> told.values().stream().mapToInt(Set::size).sum() == 20,
                () -> consumer.poll(Duration.ofMillis(200)));
        }
        check(failed.isEmpty(), "failed: " + failed);
    }

    static void recordLimit(String topic, String group) throws Exception {
        send(topic, 0, 100);
        Map<String, String> limit = Map.of("share.acquire.mode", "record_limit", "max.poll.records", "7");
        try (var consumer = consumer(group, topic, limit)) {
            Set<String> got = new HashSet<>();
            until(() -> got.size() == 100, () -> {
                var some = consumer.poll(Duration.ofMillis(500));
                check(some.count() <= 7, some.count() + " at once");
                some.forEach(one -> got.add(one.value()));
            });
        }
    }

    static void several(String topic, String group) throws Exception {
        List<KafkaShareConsumer<String, String>> consumers = new ArrayList<>();
        for (int at = 0; at < 3; at++) consumers.add(consumer(group, topic, Map.of("max.poll.records", "10")));
        List<String> got = new ArrayList<>();
        for (var one : consumers) one.poll(Duration.ofMillis(500));
        for (int at = 0; at < 30; at++) send(topic, at * 10, 10);
        until(() -> got.size() >= 300, () -> {
            for (var one : consumers) one.poll(Duration.ofMillis(100)).forEach(record -> got.add(record.value()));
        });
        for (var one : consumers) one.close();
        check(new HashSet<>(got).size() == 300 && got.size() == 300, got.size() + " for 300");
    }

    static void close(String topic, String group) throws Exception {
        send(topic, 0, 10);
        try (var first = consumer(group, topic, explicitly())) {
            poll(first, all -> all.size() >= 10);  // and says nothing of them
        }
        try (var second = consumer(group, topic, Map.of())) {
            check(values(poll(second, all -> all.size() >= 10)).size() == 10, "they come again");
        }
    }

    static void renew(String topic, String group) throws Exception {
        configure(group, "share.record.lock.duration.ms", "4000");
        send(topic, 0, 1);
        try (var consumer = consumer(group, topic, explicitly())) {
            var one = poll(consumer, all -> all.size() >= 1).get(0);
            for (int times = 0; times < 3; times++) {
                consumer.acknowledge(one, AcknowledgeType.RENEW);
                consumer.commitSync().forEach((at, failed) -> check(failed.isEmpty(), at + ": " + failed));
                Thread.sleep(2000);
                consumer.poll(Duration.ofMillis(100)).forEach(same -> check(count(same) == 1, "it came again"));
            }
            consumer.acknowledge(one, AcknowledgeType.ACCEPT);
            consumer.commitSync().forEach((at, failed) -> check(failed.isEmpty(), at + ": " + failed));
        }
        nothingIsLeft(topic, group);
    }

    static void lostLease(String topic, String group) throws Exception {
        configure(group, "share.record.lock.duration.ms", "1000");
        send(topic, 0, 5);
        try (var slow = consumer(group, topic, explicitly()); var other = consumer(group, topic, Map.of())) {
            var lost = poll(slow, all -> all.size() >= 5);
            Set<String> got = new HashSet<>();
            until(() -> got.size() == 5, () -> other.poll(Duration.ofMillis(300)).forEach(one -> {
                check(count(one) > 1, "it is no first delivery");
                got.add(one.value());
            }));
            for (var one : lost) slow.acknowledge(one, AcknowledgeType.ACCEPT);
            var told = slow.commitSync();
            check(told.values().stream().anyMatch(Optional::isPresent), "nobody said that the lease was lost");
        }
    }

    static void latest(String topic, String group) throws Exception {
        send(topic, 0, 10);
        try (var consumer = consumer("at-the-end", topic, Map.of())) {
            until(() -> state("at-the-end") == GroupState.STABLE, () -> consumer.poll(Duration.ofMillis(300)));
            send(topic, 10, 1);
            check(values(poll(consumer, all -> all.size() >= 1)).equals(Set.of("10")), "what was sent since");
        }
    }

    static void admin(String topic, String group) throws Exception {
        send(topic, 0, 10);
        try (var admin = Admin.create(settings()); var consumer = consumer(group, topic, Map.of())) {
            poll(consumer, all -> all.size() >= 10);
            consumer.commitSync();
            var shares = ListGroupsOptions.forShareGroups();
            var names = admin.listGroups(shares).all().get().stream().map(GroupListing::groupId).toList();
            check(names.contains(group), names + " are listed");
            var told = admin.describeShareGroups(List.of(group)).all().get().get(group);
            check(told.members().size() == 1 && told.groupState() == GroupState.STABLE, told.toString());
        }
        nothingIsLeft(topic, group);
        try (var admin = Admin.create(settings())) {
            admin.alterShareGroupOffsets(group, Map.of(new TopicPartition(topic, 0), 0L)).all().get();
            admin.deleteShareGroupOffsets(group, Set.of(topic)).all().get();
            admin.deleteShareGroups(List.of(group)).all().get();
        }
    }

    // ---- what they need ----

    static Properties settings() {
        Properties found = new Properties();
        found.put("bootstrap.servers", server);
        return found;
    }

    static Map<String, String> explicitly() {
        return Map.of("share.acknowledgement.mode", "explicit");
    }

    static void make(String topic, String group) throws Exception {
        try (var admin = Admin.create(settings())) {
            admin.createTopics(List.of(new NewTopic(topic, 2, (short) 1))).all().get();
        }
        configure(group, "share.auto.offset.reset", "earliest");
    }

    static void configure(String group, String name, String value) throws Exception {
        try (var admin = Admin.create(settings())) {
            var of = new ConfigResource(ConfigResource.Type.GROUP, group);
            var set = new AlterConfigOp(new ConfigEntry(name, value), AlterConfigOp.OpType.SET);
            admin.incrementalAlterConfigs(Map.of(of, List.of(set))).all().get();
        }
    }

    static GroupState state(String group) throws Exception {
        try (var admin = Admin.create(settings())) {
            return admin.describeShareGroups(List.of(group)).all().get().get(group).groupState();
        } catch (java.util.concurrent.ExecutionException notYet) {
            return GroupState.UNKNOWN;
        }
    }

    static void send(String topic, int first, int many) throws Exception {
        try (var producer = new KafkaProducer<>(settings(), new StringSerializer(), new StringSerializer())) {
            for (int at = first; at < first + many; at++) {
                producer.send(new ProducerRecord<>(topic, "" + at, "" + at));
            }
            producer.flush();
        }
    }

    static KafkaShareConsumer<String, String> consumer(String group, String topic, Map<String, String> more) {
        Properties own = settings();
        own.put("group.id", group);
        own.putAll(more);
        var found = new KafkaShareConsumer<>(own, new StringDeserializer(), new StringDeserializer());
        found.subscribe(List.of(topic));
        return found;
    }

    static List<ConsumerRecord<String, String>> poll(
        KafkaShareConsumer<String, String> consumer, Predicate<List<?>> enough
    ) throws Exception {
        List<ConsumerRecord<String, String>> got = new ArrayList<>();
        until(() -> enough.test(got), () -> consumer.poll(Duration.ofMillis(500)).forEach(got::add));
        return got;
    }

    interface Asked { boolean is() throws Exception; }

    interface Step { void run() throws Exception; }

    static void until(Asked so, Step step) throws Exception {
        long end = System.currentTimeMillis() + PATIENCE_MS;
        while (!so.is()) {
            check(System.currentTimeMillis() < end, "it took too long");
            step.run();
        }
    }

    static void nothingIsLeft(String topic, String group) throws Exception {
        try (var admin = Admin.create(settings())) {
            var asked = Map.of(group, new ListShareGroupOffsetsSpec());
            var starts = admin.listShareGroupOffsets(asked).partitionsToOffsetInfo(group).get();
            var ends = admin.listOffsets(starts.keySet().stream().collect(
                Collectors.toMap(at -> at, at -> OffsetSpec.latest()))).all().get();
            starts.forEach((at, told) ->
                check(told.startOffset() == ends.get(at).offset(), at + " is at " + told.startOffset()));
        }
    }

    static Set<String> values(List<ConsumerRecord<String, String>> got) {
        return got.stream().map(ConsumerRecord::value).collect(Collectors.toSet());
    }

    static int count(ConsumerRecord<String, String> one) {
        return one.deliveryCount().get();
    }

    static void check(boolean so, String what) {
        if (!so) throw new AssertionError(what);
    }
}
