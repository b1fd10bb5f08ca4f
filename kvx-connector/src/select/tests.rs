use proptest::prelude::*;
use proptest::sample::Index;

use super::*;
use kvx_core::backend::PeerInfo;
use kvx_core::registry::Apart;

struct Refuses;

#[async_trait::async_trait]
impl kvx_core::registry::Opener for Refuses {
    async fn open(&self, _: &BackendConfig) -> Result<Arc<dyn TransferBackend>> {
        Err(Error::unsupported("open", "a test"))
    }
}

fn available(options: &BackendConfig) -> Probe {
    if let Err(error) = options.refuse_unknown(&["device"]) {
        return Probe::bad_options(&error, "name the device");
    }
    let device = options.text("device").unwrap_or("first");
    let capabilities = Box::new(kvx_core::capability::Capabilities::none());
    Probe::Available { detail: format!("device {device}"), capabilities }
}

fn unavailable(_: &BackendConfig) -> Probe {
    Probe::Unavailable { reason: "no library".into(), remedy: Some("install it".into()) }
}

const fn entry(
    name: &'static str,
    rank: Option<u32>,
    probe: fn(&BackendConfig) -> Probe,
) -> Registration {
    Registration { name, about: "a test", rank, probe, opener: &Refuses, apart: None }
}

static SLOW: Registration = entry("slow", Some(10), available);
static FAST: Registration = entry("fast", Some(20), available);
static BEST: Registration = entry("best", Some(30), unavailable);
static TWIN: Registration = entry("twin", Some(20), available);
static SHY: Registration = entry("shy", None, available);
static ALL: [&Registration; 5] = [&SLOW, &SHY, &TWIN, &BEST, &FAST];

fn named(name: &str) -> Policy {
    Policy::default().with_name(Some(name))
}

fn verdicts(choice: &Choice) -> Vec<(&'static str, String)> {
    choice.considered.iter().map(|one| (one.name, one.verdict.to_string())).collect()
}

#[test]
fn unasked_the_best_rank_wins_and_the_name_decides_between_equals() {
    let choice = choose_among(&ALL, &Policy::default(), None).unwrap();
    assert_eq!((choice.registration.name, choice.reason), ("fast", ChoiceReason::Ranked));
    let expected = [
        ("best", "unavailable: no library; install it"),
        ("fast", "chosen"),
        ("shy", "never chosen unasked"),
        ("slow", "available, but its rank 10 is not the best"),
        ("twin", "available, but its rank 20 is not the best"),
    ];
    assert_eq!(verdicts(&choice), expected.map(|(name, why)| (name, why.to_owned())));
    assert_eq!(choice.to_string(), "fast: the best of those that can be used (device first)");
}

#[test]
fn one_alone_is_the_choice_unless_it_is_never_chosen_unasked() {
    let choice = choose_among(&[&SLOW], &Policy::default(), None).unwrap();
    assert_eq!((choice.registration.name, choice.reason), ("slow", ChoiceReason::Only));
    let choice = choose_among(&[&SLOW, &BEST, &SHY], &Policy::default(), None).unwrap();
    assert_eq!((choice.registration.name, choice.reason), ("slow", ChoiceReason::Only));

    let error = choose_among(&[&SHY], &Policy::default(), None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("shy=never chosen unasked"), "{error}");
    assert!(error.remedy().unwrap().contains("KVX_BACKEND"), "{error}");
}

#[test]
fn a_name_goes_before_the_environment_and_that_before_the_ranks() {
    let mut policy = Policy { environment: Some("slow".into()), ..Policy::default() };
    let choice = choose_among(&ALL, &policy, None).unwrap();
    assert_eq!((choice.registration.name, choice.reason), ("slow", ChoiceReason::Environment));
    policy.name = Some("shy".into());
    let choice = choose_among(&ALL, &policy, None).unwrap();
    assert_eq!((choice.registration.name, choice.reason), ("shy", ChoiceReason::Named));
    assert_eq!(verdicts(&choice)[1], ("fast", "another one was named".into()));
}

#[test]
fn a_name_that_cannot_be_had_is_an_error_and_nothing_else_is_taken() {
    let error = choose_among(&ALL, &named("best"), None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert_eq!(error.message(), "it cannot be used here: no library");
    assert_eq!((error.backend(), error.remedy()), (Some("best"), Some("install it")));

    let error = choose_among(&ALL, &named("nope"), None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("registered=best, fast, shy, slow, twin"), "{error}");
    assert!(!error.to_string().contains("named_by"), "{error}");
    let policy = Policy { environment: Some("best".into()), ..Policy::default() };
    let error = choose_among(&ALL, &policy, None).unwrap_err();
    assert!(error.to_string().contains("named_by=KVX_BACKEND"), "{error}");

    let policy = Policy { environment: Some("fast,a=1, b=2".into()), ..Policy::default() };
    let error = choose_among(&ALL, &policy, None).unwrap_err();
    let remedy =
        "options have a variable of their own: KVX_BACKEND=fast KVX_BACKEND_OPTIONS=a=1, b=2";
    assert_eq!(error.remedy(), Some(remedy));
    let error = choose_among(&ALL, &named("fast,a=1"), None).unwrap_err();
    assert_eq!(error.remedy(), Some("name it \"fast\", and give its options apart"));

    let error = choose_among(&ALL, &named("fast"), Some(&["slow", "shy"])).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("peer=slow, shy"), "{error}");

    let policy = Policy { allow: Some(vec!["slow".into()]), ..named("fast") };
    let error = choose_among(&ALL, &policy, None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("allowed=slow"), "{error}");
}

#[test]
fn when_none_can_be_used_the_error_lists_what_speaks_against_each() {
    let policy = Policy { allow: Some(vec!["best".into(), "fast".into()]), ..Policy::default() };
    let error = choose_among(&ALL, &policy, Some(&["best", "slow"])).unwrap_err().to_string();
    for part in [
        "best=unavailable: no library; install it",
        "fast=the peer does not have it",
        "shy=not allowed by the policy",
        "slow=not allowed by the policy",
    ] {
        assert!(error.contains(part), "{error}");
    }
    let error = choose_among(&[], &Policy::default(), None).unwrap_err();
    assert!(error.remedy().unwrap().contains("feature"), "{error}");
}

#[test]
fn options_go_to_the_backend_that_is_named_and_to_no_other() {
    let options: BackendConfig = "device=second".parse().unwrap();
    let policy = Policy { options: options.clone(), ..named("slow") };
    assert_eq!(choose_among(&ALL, &policy, None).unwrap().detail, "device second");
    let policy = Policy { options: "devise=second".parse().unwrap(), ..named("slow") };
    let error = choose_among(&ALL, &policy, None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert_eq!(error.message(), "unknown option \"devise\" (options=device)");
    assert_eq!((error.backend(), error.remedy()), (Some("slow"), Some("name the device")));
    let policy = Policy { options, ..Policy::default() };
    for error in
        [choose_among(&ALL, &policy, None).unwrap_err(), offers_among(&ALL, &policy).unwrap_err()]
    {
        assert_eq!(error.kind(), ErrorKind::Config);
    }
}

/// Options of the environment are for the backend that the environment names, and whoever has them wrong is told where they are.
#[test]
fn options_of_the_environment_count_for_its_backend_alone() {
    let from_env = || Policy::of(Some("slow".into()), Some("device=second")).unwrap();
    for (written, device) in [
        (None, "second"),
        (Some("slow"), "second"),
        (Some(" slow "), "second"),
        (Some("slow,device=third"), "third"),
        (Some("fast"), "first"),
        (Some("fast,device=third"), "third"),
    ] {
        let policy = written
            .map_or_else(|| Ok(from_env()), |text| from_env().with_text("--backend", text))
            .unwrap();
        let choice = choose_among(&ALL, &policy, None).unwrap();
        assert_eq!(choice.detail, format!("device {device}"), "{written:?}");
    }
    // What a program sets itself is its own, whatever it names.
    let mut policy = from_env();
    policy.options = BackendConfig::new().with("device", "own");
    assert_eq!(policy.with_name(Some("fast")).options.text("device"), Some("own"));

    let wrong = Policy::of(Some("slow".into()), Some("tls=tcp")).unwrap();
    for (written, origin) in [
        (None, "KVX_BACKEND_OPTIONS"),
        (Some("slow"), "KVX_BACKEND_OPTIONS"),
        (Some("fast,tls=tcp"), "--backend"),
    ] {
        let policy = match written {
            Some(text) => wrong.clone().with_text("--backend", text).unwrap(),
            None => wrong.clone(),
        };
        let error = choose_among(&ALL, &policy, None).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert_eq!(
            error.remedy().unwrap(),
            format!("mend the options in {origin}: name the device")
        );
        assert!(error.to_string().contains(&format!("options_from={origin}")), "{error}");
    }
    choose_among(&ALL, &wrong.with_name(Some("fast")), None).unwrap();

    let alone = Policy::of(None, Some("device=second")).unwrap_err();
    assert_eq!(alone.kind(), ErrorKind::Config);
    assert!(
        alone.remedy().unwrap().contains("set KVX_BACKEND beside KVX_BACKEND_OPTIONS"),
        "{alone}"
    );
}

/// An option that is empty is one that somebody forgot: it is refused wherever options are written.
#[test]
fn an_empty_option_is_refused_wherever_it_is_written() {
    for empty in [",", "device=second,", ",device=second", "device=second,,", " "] {
        let error = Policy::of(Some("slow".into()), Some(empty)).unwrap_err();
        assert!(
            error.to_string().contains("an option is empty (options_from=KVX_BACKEND_OPTIONS)"),
            "{error}"
        );
        let text = format!("slow,{empty}");
        let error = Policy::default().with_text("--backend", &text).unwrap_err();
        assert!(
            error.to_string().contains("an option is empty (options_from=--backend)"),
            "{error}"
        );
    }
    assert!(Policy::default().with_text("--backend", "slow,").is_err());
    for name in ["slow,", "slow, ,"] {
        let policy = Policy::of(Some(name.into()), None).unwrap();
        let error = choose_among(&ALL, &policy, None).unwrap_err();
        assert_eq!(error.remedy(), Some("drop the comma: KVX_BACKEND=slow"));
    }
}

fn here_only(_: &BackendConfig) -> Probe {
    let mut capabilities = kvx_core::capability::Capabilities::none();
    capabilities.place = Some("this host".into());
    Probe::Available { detail: "near".into(), capabilities: Box::new(capabilities) }
}

/// The best of all reaches one host: it is for peers of that host, and for those that do not say where they are.
#[test]
fn a_peer_at_another_place_is_not_met_there() {
    static NEAR: Registration = entry("near", Some(90), here_only);
    let all = [&NEAR, &SLOW];
    let policy = Policy::default();
    assert_eq!(offers_among(&all, &policy).unwrap(), ["near@this host", "slow"]);
    assert_eq!(offers_among(&all, &named("near")).unwrap(), ["near@this host"]);
    for (peer, chosen) in [
        (None, "near"),
        (Some(["near@this host", "slow"]), "near"),
        (Some(["near", "slow"]), "near"),
        (Some(["near@another host", "slow"]), "slow"),
        (Some(["nearer@this host", "slow"]), "slow"),
    ] {
        let choice = choose_among(&all, &policy, peer.as_ref().map(|peer| &peer[..])).unwrap();
        assert_eq!(choice.registration.name, chosen, "{peer:?}");
    }
    let elsewhere = choose_among(&all, &policy, Some(&["near@another host", "slow"])).unwrap();
    let verdict = "the peer is elsewhere: at another host, not at this host";
    assert_eq!(verdicts(&elsewhere)[0], ("near", verdict.to_owned()));
    let error = choose_among(&all, &named("near"), Some(&["near@another host"])).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("there=another host"), "{error}");
    assert!(error.remedy().is_some());
}

/// A backend that knows in what two places differ says so in its own words, whether it was named or not.
#[test]
fn places_that_differ_are_told_apart_by_the_backend() {
    fn apart(here: &str, there: &str) -> Option<Apart> {
        (here == "this host" && there == "another host")
            .then(|| Apart { why: "two hosts".into(), remedy: "move one".into() })
    }
    static NEAR: Registration =
        Registration { apart: Some(apart), ..entry("near", Some(90), here_only) };
    for policy in [Policy::default(), named("near")] {
        let error = choose_among(&[&NEAR], &policy, Some(&["near@another host"])).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("two hosts") && text.contains("another host"), "{text}");
        assert!(error.remedy().unwrap().contains("move one"), "{text}");
        assert_eq!(text.matches("move one").count(), 1, "{text}");
        // Of a place that it cannot read it says nothing.
        let error = choose_among(&[&NEAR], &policy, Some(&["near@elsewhere"])).unwrap_err();
        assert!(error.to_string().contains("elsewhere") && error.remedy().is_some(), "{error}");
    }
}

#[test]
fn offers_are_what_could_be_chosen() {
    assert_eq!(offers_among(&ALL, &Policy::default()).unwrap(), ["fast", "slow", "twin"]);
    let policy = Policy { allow: Some(vec!["slow".into(), "best".into()]), ..Policy::default() };
    assert_eq!(offers_among(&ALL, &policy).unwrap(), ["slow"]);
    assert_eq!(offers_among(&ALL, &named("shy")).unwrap(), ["shy"]);
    assert!(offers_among(&ALL, &named("best")).unwrap().is_empty());
    assert_eq!(offers_among(&ALL, &named("nope")).unwrap_err().kind(), ErrorKind::Config);
}

#[test]
fn transports_can_be_required() {
    let policy =
        Policy { transports: Some(vec!["rc_*".into(), "efa".into()]), ..Policy::default() };
    for good in ["rc_mlx5", "rc_verbs", "efa"] {
        policy.check_transport(&PeerInfo::new(good)).unwrap();
    }
    for bad in ["tcp", "efa2", "xrc_mlx5", ""] {
        let error = policy.check_transport(&PeerInfo::new(bad)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("allowed=rc_*, efa"), "{error}");
    }
    Policy::default().check_transport(&PeerInfo::new("tcp")).unwrap();
}

#[test]
fn a_choice_is_written_as_json() {
    let choice = choose_among(&[&SLOW, &SHY], &named("slow"), None).unwrap();
    assert_eq!(
        serde_json::to_value(&choice).unwrap(),
        serde_json::json!({
            "backend": "slow",
            "reason": "named",
            "detail": "device first",
            "considered": [
                { "name": "shy", "verdict": "not_named" },
                { "name": "slow", "verdict": "chosen" },
            ],
        })
    );
}

const NAMES: [&str; 8] = ["a", "b", "c", "d", "e", "f", "g", "h"];

/// What a program may have: distinct names; ranks that are often equal.
fn registrations() -> impl Strategy<Value = Vec<(usize, Option<u32>)>> {
    proptest::sample::subsequence((0..NAMES.len()).collect::<Vec<_>>(), 0..=NAMES.len())
        .prop_flat_map(|names| {
            let ranks =
                proptest::collection::vec(proptest::option::weighted(0.8, 0_u32..4), names.len());
            ranks.prop_map(move |ranks| names.iter().copied().zip(ranks).collect())
        })
}

/// The backends of a program in which those in `there` can be used. They live as long as the test.
fn made(list: &[(usize, Option<u32>)], there: u8) -> Vec<&'static Registration> {
    list.iter()
        .map(|(name, rank)| {
            let probe = if there & 1 << name != 0 { available } else { unavailable };
            &*Box::leak(Box::new(entry(NAMES[*name], *rank, probe)))
        })
        .collect()
}

fn names(bits: u8) -> Vec<&'static str> {
    (0..NAMES.len()).filter(|name| bits & 1 << name != 0).map(|name| NAMES[name]).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Unasked: the highest rank of what is allowed, common and available, then the first name; in whatever order the
    /// linker put them. Every backend is accounted for.
    #[test]
    fn the_choice_follows_from_the_rules_alone(
        list in registrations(),
        there: u8,
        allow in proptest::option::of(any::<u8>()),
        peer in proptest::option::of(any::<u8>()),
        swaps in proptest::collection::vec((any::<Index>(), any::<Index>()), 0..8),
    ) {
        let registered = made(&list, there);
        let allow = allow.map(names);
        let peer = peer.map(names);
        let policy = Policy {
            allow: allow.clone().map(|names| names.into_iter().map(str::to_owned).collect()),
            ..Policy::default()
        };
        let expected = list
            .iter()
            .filter_map(|(name, rank)| Some((NAMES[*name], (*rank)?, there & 1 << name != 0)))
            .filter(|(name, _, there)| {
                let within = |names: &Option<Vec<&str>>| names.as_ref().is_none_or(|n| n.contains(name));
                *there && within(&allow) && within(&peer)
            })
            .max_by_key(|(name, rank, _)| (*rank, std::cmp::Reverse(*name)))
            .map(|(name, ..)| name);

        let choice = choose_among(&registered, &policy, peer.as_deref());
        prop_assert_eq!(choice.as_ref().ok().map(|choice| choice.registration.name), expected);

        let mut shuffled = registered.clone();
        for (one, other) in swaps {
            if !shuffled.is_empty() {
                let (one, other) = (one.index(shuffled.len()), other.index(shuffled.len()));
                shuffled.swap(one, other);
            }
        }
        match (choice, choose_among(&shuffled, &policy, peer.as_deref())) {
            (Ok(first), Ok(second)) => {
                prop_assert!(std::ptr::eq(first.registration, second.registration));
                prop_assert_eq!(first.reason, second.reason);
                prop_assert_eq!(&first.considered, &second.considered);
                let considered: Vec<_> = first.considered.iter().map(|one| one.name).collect();
                let all: Vec<_> = list.iter().map(|(name, _)| NAMES[*name]).collect();
                prop_assert_eq!(considered, all);
                let chosen = first.considered.iter().filter(|one| one.verdict == Verdict::Chosen);
                prop_assert_eq!(chosen.count(), 1);
            }
            (Err(first), Err(second)) => {
                prop_assert_eq!(first.kind(), ErrorKind::Unsupported);
                prop_assert_eq!(first.context().len(), list.len());
                prop_assert_eq!(first.to_string(), second.to_string());
            }
            (first, second) => prop_assert!(false, "{first:?} but {second:?}"),
        }
    }

    /// Two sides with the same kvx, on different hosts, that know each other's offers choose the same or both fail.
    #[test]
    fn both_sides_choose_the_same(list in registrations(), mine: u8, theirs: u8) {
        let policy = Policy::default();
        let sides = [made(&list, mine), made(&list, theirs)];
        let offers = sides.each_ref().map(|side| offers_among(side, &policy).unwrap());
        let chosen = [(0, 1), (1, 0)].map(|(me, peer)| {
            let offers: Vec<&str> = offers[peer].iter().map(String::as_str).collect();
            choose_among(&sides[me], &policy, Some(&offers)).ok().map(|c| c.registration.name)
        });
        prop_assert_eq!(chosen[0], chosen[1]);
        let common = offers[0].iter().any(|name| offers[1].contains(name));
        prop_assert_eq!(chosen[0].is_some(), common);
    }
}
