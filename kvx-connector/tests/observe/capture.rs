//! A subscriber that keeps what is said.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// The one of this process. Tests tell theirs by the traces of their requests.
pub(crate) fn installed() -> Captured {
    static INSTALLED: OnceLock<Captured> = OnceLock::new();
    let captured = INSTALLED.get_or_init(|| {
        let captured = Captured::default();
        tracing::subscriber::set_global_default(captured.clone()).unwrap();
        captured
    });
    captured.clone()
}

type Fields = BTreeMap<String, String>;

/// Something that was said.
#[derive(Clone, Debug)]
pub(crate) struct Said {
    pub(crate) level: Level,
    /// Its own fields.
    pub(crate) own: Fields,
    /// Its own fields, and those of all spans that it is in.
    pub(crate) fields: Fields,
}

impl Said {
    pub(crate) fn is(&self, message: &str) -> bool {
        self.own.get("message").is_some_and(|said| said == message)
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Captured(Arc<Inside>);

#[derive(Debug, Default)]
struct Inside {
    next: AtomicU64,
    /// Fields of spans with those of their parents, and how many hold them.
    spans: Mutex<BTreeMap<u64, (Fields, usize)>>,
    said: Mutex<Vec<Said>>,
}

thread_local! {
    static CURRENT: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

impl Captured {
    /// All that was said under a trace by an engine, in order.
    pub(crate) fn said(&self, trace: &str, engine: &str) -> Vec<Said> {
        let has = |said: &Said, name: &str, value: &str| {
            said.fields.get(name).is_some_and(|found| found == value)
        };
        let said = self.0.said.lock().unwrap();
        let mine = said.iter().filter(|one| has(one, "trace", trace) && has(one, "engine", engine));
        mine.cloned().collect()
    }

    /// How many spans of a trace are not closed.
    pub(crate) fn open(&self, trace: &str) -> usize {
        let spans = self.0.spans.lock().unwrap();
        spans
            .values()
            .filter(|(fields, _)| fields.get("trace").is_some_and(|of| of == trace))
            .count()
    }

    fn parent(&self, explicit: Option<&Id>, contextual: bool) -> Fields {
        let current = || CURRENT.with_borrow(|stack| stack.last().copied());
        let parent = explicit.map(Id::into_u64).or_else(|| contextual.then(current).flatten());
        let spans = self.0.spans.lock().unwrap();
        parent.and_then(|id| spans.get(&id)).map(|(fields, _)| fields.clone()).unwrap_or_default()
    }
}

#[derive(Default)]
struct Collect(Fields);

impl Visit for Collect {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.to_owned());
    }
}

impl Subscriber for Captured {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("kvx_connector") && *metadata.level() <= Level::DEBUG
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut fields = self.parent(span.parent(), span.is_contextual());
        let mut own = Collect::default();
        span.record(&mut own);
        fields.extend(own.0);
        let id = self.0.next.fetch_add(1, Ordering::Relaxed) + 1;
        self.0.spans.lock().unwrap().insert(id, (fields, 1));
        Id::from_u64(id)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut fields = self.parent(event.parent(), event.is_contextual());
        let mut own = Collect::default();
        event.record(&mut own);
        fields.extend(own.0.clone());
        let level = *event.metadata().level();
        self.0.said.lock().unwrap().push(Said { level, own: own.0, fields });
    }

    fn enter(&self, span: &Id) {
        CURRENT.with_borrow_mut(|stack| stack.push(span.into_u64()));
    }

    fn exit(&self, _: &Id) {
        CURRENT.with_borrow_mut(|stack| stack.truncate(stack.len().saturating_sub(1)));
    }

    fn clone_span(&self, id: &Id) -> Id {
        if let Some((_, holders)) = self.0.spans.lock().unwrap().get_mut(&id.into_u64()) {
            *holders += 1;
        }
        id.clone()
    }

    fn try_close(&self, id: Id) -> bool {
        let mut spans = self.0.spans.lock().unwrap();
        let Some((_, holders)) = spans.get_mut(&id.into_u64()) else { return false };
        *holders -= 1;
        let over = *holders == 0;
        if over {
            spans.remove(&id.into_u64());
        }
        over
    }
}
