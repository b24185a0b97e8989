/* What stands before the page until it is left: dialogs, and a picture large with its figures. */
(function () {
  "use strict";

  const { html, parts } = window.glmGallery;
  const { Picture } = parts;
  const { useEffect, useRef } = preactHooks;

  /**
   * A picture large, beside its sources, its target and the differences to them, with all its
   * figures.
   *
   * @param items What can be paged through: [{image, target, sources, alt, title, body}]; body()
   *     gives what stands below the pictures.
   * @param index Of the item shown.
   * @param onIndex Called with the index to show next.
   * @param onClose Called when the viewer was left; what had the focus before has it again.
   */
  function Viewer({ items, index, onIndex, onClose }) {
    const show = (next) => items[next] && onIndex(next);
    parts.useKeys(
      { ArrowLeft: () => show(index - 1), ArrowRight: () => show(index + 1) },
      { isInDialog: true },
    );
    const { image, target, alt, title, body } = items[index];
    const sources = items[index].sources || [];
    const step = (name, next) =>
      html`<button type="button" disabled=${!items[next]} onClick=${() => show(next)}>
        ${name}
      </button>`;
    const buttons = [step("Previous", index - 1), step("Next", index + 1)];
    return html`<${Dialog} className="viewer" title=${title} buttons=${buttons} onClose=${onClose}>
      <div class="viewer-pictures">
        ${sources.map(
          (source, number) =>
            html`<${Plate} key=${number} caption="Source" image=${source} alt="Source" />`,
        )}
        ${target && html`<${Plate} caption="Target" image=${target} alt="Target" />`}
        <${Plate} caption="Sample" image=${image} alt=${alt} />
        ${
          target &&
          html`<${Plate} caption="Difference, brightened" image=${image}
          target=${target} alt=${alt} isDiff />`
        }
        ${
          sources[0] &&
          html`<${Plate} caption="Difference to the source, brightened" image=${image}
          target=${sources[0]} alt=${alt} isDiff />`
        }
      </div>
      ${body()}
    </${Dialog}>`;
  }

  function Plate({ caption, ...picture }) {
    return html`<figure>
      <${Picture} ...${picture} isFull />
      <figcaption>${caption}</figcaption>
    </figure>`;
  }

  /**
   * What stands before the page until it is left by Escape or its button; what had the focus
   * before has it again.
   *
   * @param title Heading; announced when it changes.
   * @param buttons Beside the button that closes.
   * @param onClose Called when it was left.
   */
  function Dialog({ title, className, buttons, onClose, children }) {
    const dialog = useRef(null);
    const close = useRef(null);
    const isShown = useRef(true);
    useEffect(() => {
      dialog.current.showModal();
      /* By hand: of an element that enters the page later the browser ignores `autofocus`, and says
         so in the console. */
      close.current.focus();
      return () => {
        isShown.current = false;
        dialog.current.close();
      };
    }, []);
    /* The browser closes a dialog by itself on Escape, and gives the focus back; the state
       follows. */
    return html`<dialog ref=${dialog} class=${className} aria-labelledby="dialog-title"
        onClose=${() => isShown.current && onClose()}>
      <div class="dialog-head">
        <h2 id="dialog-title" aria-live="polite">${title}</h2>
        <div class="buttons">
          ${buttons}
          <button type="button" ref=${close} onClick=${onClose}>Close</button>
        </div>
      </div>
      ${children}
    </dialog>`;
  }

  Object.assign(parts, { Dialog, Viewer });
})();
